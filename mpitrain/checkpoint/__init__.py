"""Checkpoints: parts that each rank writes by itself, verified when read; safetensors and JSON, never pickle."""

from mpitrain.checkpoint.keeper import Keeper
from mpitrain.checkpoint.parts import Checkpoint, newest, read_part, write_part
from mpitrain.checkpoint.policy import CheckpointPolicy, read_policy

__all__ = ["Checkpoint", "CheckpointPolicy", "Keeper", "newest", "read_part", "read_policy", "write_part"]
