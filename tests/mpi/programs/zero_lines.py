"""A script that does not know of us: torch has found the backend by itself (`import mpitrain` is nowhere before)."""

import os
import sys
from typing import Any

import pytest
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
assert dist.get_backend_config() == str(dist.distributed_c10d.BackendConfig(dist.Backend("gloo")))
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))  # which knows nothing of us, and makes groups by itself
for replaced, told in (
    (dist.new_group(backend="cpu:gloo"), "cpu:gloo"),
    (dist.new_group(), "gloo"),
    (dist.new_group([0, 1], backend="GLOO"), "gloo"),
    (mesh.get_group(), "gloo"),
):
    assert (type(replaced).__name__, dist.get_backend(replaced)) == ("MpiProcessGroup", told), told
    dist.monitored_barrier(group=replaced)
alone = dist.new_group([0], backend="gloo")
assert alone is dist.GroupMember.NON_GROUP_MEMBER or dist.get_backend(alone) == "gloo"
tensor = torch.ones(1)
dist.all_reduce(tensor, group=mesh.get_group())
assert tensor == 2
dist.destroy_process_group()
os.environ["MPITRAIN_REPLACES"] = "gloo,mpi"
meet("mpi")
assert type(dist.new_group()).__name__ == "MpiProcessGroup"
dist.destroy_process_group()
del os.environ["MPITRAIN_REPLACES"]
capability = dist.Backend.backend_capability["mpi4py"]
assert capability == ["cpu", "cuda"][: 1 + torch.backends.cuda.is_built()], capability

gloo_groups = []  # are never destroyed: torch 2.13's may hang
for backend, carrier in (("cpu:mpi4py,cuda:gloo", "mpi4py"), ("cpu:gloo,cuda:mpi4py", "gloo")):
    meet(backend, init_method="mpi://")
    world: Any = dist.group.WORLD
    pair: Any = dist.new_group([0, 1])
    for group in (world, pair):
        ours, others = ("cpu", "cuda") if carrier == "mpi4py" else ("cuda", "cpu")
        assert group._get_backend(torch.device(ours)) is group and dist.get_backend(group) == backend
        gloo_groups.append(group._get_backend(torch.device(others)))
        assert type(gloo_groups[-1]).__name__ == "ProcessGroupGloo", gloo_groups
        before = gloo_groups[-1]._get_sequence_number_for_group()
        gathered = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(gathered, torch.tensor([dist.get_rank(), 7]), group=group)
        assert torch.stack(gathered).tolist() == [[0, 7], [1, 7]]
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, {"rank": dist.get_rank()}, group=group)
        assert objects == [{"rank": 0}, {"rank": 1}]
        dist.barrier(group=group)
        dist.monitored_barrier(group=group)
        counted = gloo_groups[-1]._get_sequence_number_for_group() - before
        assert (counted > 0) == (carrier == "gloo"), (backend, counted)
    with pytest.raises(RuntimeError, match="No backend type associated with device type xpu"):
        world._get_backend(torch.device("xpu"))
    dist.destroy_process_group(pair)
    dist.destroy_process_group()
meet("cpu:mpi4py,cuda:gloo")
dist.destroy_process_group()
# a build without it, and one with it on a machine without a GPU
with pytest.raises((RuntimeError, ValueError), match="(?i)nccl"):
    dist.init_process_group("cpu:mpi4py,cuda:nccl", init_method="mpi://")
assert not dist.is_initialized()
meet("cpu:gloo,cuda:gloo", init_method="mpi://")
gloo_groups.append(dist.group.WORLD)
dist.destroy_process_group()
meet("gloo", init_method="mpi://")
print("; ".join(found), flush=True)
dist.barrier()
