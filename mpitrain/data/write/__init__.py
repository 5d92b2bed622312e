"""From examples to shard files."""
