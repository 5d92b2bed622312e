"""What may be handed to MPI, and how device memory gets there."""
