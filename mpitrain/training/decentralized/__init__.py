"""A run of peers."""
