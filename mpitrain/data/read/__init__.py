"""From shard files to batches."""
