"""One rank leaves the group, and the others call a collective."""

import sys

import torch
import torch.distributed as dist

import mpitrain  # noqa: F401

dist.init_process_group("mpi4py")
dist.barrier()
if dist.get_rank() == 1:
    sys.exit(0)
try:
    dist.all_reduce(torch.ones(3))
except ValueError as error:
    print(f"told: {error}", flush=True)
