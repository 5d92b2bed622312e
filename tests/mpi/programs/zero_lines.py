"""A script that does not know of us: torch has found the backend by itself (`import mpitrain` is nowhere before)."""

import os
import sys

import torch
import torch.distributed as dist

assert not {"mpitrain.mpi", "mpi4py"} & set(sys.modules), "MPI before a process group asks for it"
found = []


def meet(backend, **options):
    dist.init_process_group(backend, **options)
    tensor = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3.0] * 3, tensor
    found.append(f"{dist.get_backend()} {dist.get_world_size()}")


meet("mpi4py")
beside = dist.new_group(backend="gloo")  # meets in a store that all ranks see, though ours needs none
tensor = torch.ones(1)
dist.all_reduce(tensor, group=beside)
found.append(f"{dist.get_backend(beside)} {int(tensor)}")
kept = beside, torch.distributed.distributed_c10d._world.pg_map[beside]
torch.distributed.distributed_c10d._world.pg_map.pop(
    beside
)  # torch 2.13's gloo may hang when it is destroyed
dist.destroy_process_group()

for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
    os.environ.pop(name)  # ours has set them for scripts that ask
meet("mpi4py", init_method="env://")
dist.destroy_process_group()
meet("cpu:mpi4py", init_method="mpi://")
dist.destroy_process_group()
os.environ["MPITRAIN_REPLACES"] = "gloo"
meet("gloo")
assert type(dist.group.WORLD).__name__ == "MpiProcessGroup"
assert dist.get_backend(dist.new_group(backend="cpu:gloo")) == "mpi4py"
dist.destroy_process_group()
del os.environ["MPITRAIN_REPLACES"]
meet("gloo", init_method="mpi://")
print("; ".join(found), flush=True)
dist.barrier()
