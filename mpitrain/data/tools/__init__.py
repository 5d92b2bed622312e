"""What `mpitrain data` does with a packed dataset."""
