"""A run of servers and workers."""
