"""Checkpoints: parts that each rank writes by itself, verified when read; safetensors and JSON, never pickle."""

from mpitrain.checkpoint.background_writer import CheckpointWriter, PartPlan
from mpitrain.checkpoint.parts import Checkpoint, newest, read_part, write_part

__all__ = ["Checkpoint", "CheckpointWriter", "PartPlan", "newest", "read_part", "write_part"]
