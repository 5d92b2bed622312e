"""Runs that divide the model: pipeline, tensor parallelism, sharded state."""
