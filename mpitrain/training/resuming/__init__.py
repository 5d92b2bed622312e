"""What a run goes on from, and whether it may."""
