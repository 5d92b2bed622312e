"""Synchronous data parallelism: torch's DDP over the process group."""
