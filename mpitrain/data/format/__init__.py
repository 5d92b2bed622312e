"""The format of a shard file and of a data set's index."""
