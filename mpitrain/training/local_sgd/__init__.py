"""Local steps and periodic averages."""
