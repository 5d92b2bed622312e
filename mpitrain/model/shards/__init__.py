"""What servers hold of a model."""
