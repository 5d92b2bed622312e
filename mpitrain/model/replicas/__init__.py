"""What workers and peers hold of a model."""
