"""What lies in a shard file and in a dataset's index."""
