"""Writes checkpoints of two parts, one after another, until it is killed. Argument: the run directory."""

import sys
from pathlib import Path

import torch

from mpitrain.checkpoint.parts import folder_of, write_part
from mpitrain.system.files.run_directory import Identity

run_dir, ours = Path(sys.argv[1]), Identity("run", "attempt")
print("ready", flush=True)
for mark in range(1, 10**6):
    state = {"x": torch.full((20000,), float(mark))}
    write_part(folder_of(run_dir, mark), "shard-1", state, ours)
    write_part(folder_of(run_dir, mark), "shard-0", state, ours, ["shard-0", "shard-1"])
