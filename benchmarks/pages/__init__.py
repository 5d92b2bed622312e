"""What is written of the rows: nothing else reads `results/`."""
