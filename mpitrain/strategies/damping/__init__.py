"""What a stale gradient is worth: one file a damping, and their base."""
