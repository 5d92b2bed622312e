"""Collectives while somebody looks at them, and what torch's C++ is told, from torch 2.14 on; gloo beside ours."""

import gc
import json
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from mpitrain.errors import UsageError
from tests.mpi.cases import raises, run_cases, starts

later: Any = dist  # with what torch 2.14 has
recorders: Any = c10d
warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 renames all_gather_into_tensor


def collectives(group):
    """One of each kind, with the results that they must have."""
    rank, size = group.rank(), group.size()
    every, after, before = list(range(size)), (rank + 1) % size, (rank - 1) % size
    own, summed = torch.full((2,), float(rank)), torch.full((2,), float(sum(every)))
    tensor = own.clone()
    work = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    assert work.is_completed() and tensor.equal(summed)
    dist.broadcast(tensor, 0, group=group)
    parts = [torch.zeros(2) for _ in every]
    dist.all_gather(parts, own, group=group)
    whole = torch.zeros(2 * size)
    dist.all_gather_into_tensor(whole, own, group=group)
    assert whole.equal(torch.cat(parts)) and whole[::2].tolist() == every
    part = torch.zeros(2)
    dist.reduce_scatter_tensor(part, whole, group=group)
    assert part.tolist() == [rank * size] * 2
    dist.reduce_scatter(part, [own] * size, group=group)
    assert part.equal(summed)
    dist.reduce(own.clone(), 0, group=group)
    dist.gather(own, parts if rank == 0 else None, group=group)
    dist.scatter(part, [summed] * size if rank == 0 else None, group=group)
    dist.all_to_all_single(torch.zeros(2 * size), whole, group=group)
    received = torch.zeros(3)
    work = dist.isend(torch.full((3,), float(rank)), after, group=group)
    assert dist.recv(received, None, group=group) == before
    work.wait()
    assert received.eq(before).all()
    dist.barrier(group)
    assert functional.all_reduce(torch.ones(2), "sum", group).tolist() == [size] * 2


def counted(function):
    with CommDebugMode() as counts:
        function()
    return {str(name): number for name, number in counts.get_comm_counts().items()}


def step_of_fsdp(group):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    model(torch.ones(2, 4)).sum().backward()


@starts
def case_what_would_have_no_effect_is_refused(rt):
    raises(
        UsageError, "enable_reconfigure", lambda: later.init_process_group("mpi4py", enable_reconfigure=True)
    )
    dist.init_process_group("mpi4py")
    raises(RuntimeError, "no windows", later._new_window)
    assert not later._supports_window() and not later._supports_reconfigure()


def case_a_mode_counts_what_it_counts_over_gloo(rt):
    ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    for group in (ours, gloo):
        collectives(group)
    seen = [counted(lambda each=group: collectives(each)) for group in (ours, gloo)]
    assert seen[0] == seen[1] and sum(seen[0].values()) > 10, seen
    seen = [counted(lambda each=group: step_of_fsdp(each)) for group in (ours, gloo)]
    assert seen[0] == seen[1] and sum(seen[0].values()) > 3, seen
    with CommDebugMode():
        expanded = torch.ones(1).expand(4)
        raises(ValueError, "one place", lambda: dist.all_reduce(expanded))
        work = dist.all_reduce(torch.ones(2), async_op=True)
    work.wait()
    assert work.is_completed() and type(work).__name__ == "MpiWork"


def case_hooks_see_what_they_see_over_gloo(rt):
    ours, gloo, seen = dist.new_group(), dist.new_group(backend="gloo"), {}
    for group in (ours, gloo):
        seen[group] = []
        group.register_pre_hook(1, lambda call, names=seen[group]: names.append((call.name, call.root)))
        collectives(group)
        group.unregister_pre_hook(1)
        collectives(group)
    assert seen[ours] == seen[gloo] and len(seen[ours]) > 10, seen


def case_the_flight_recorder_records(rt):
    group = dist.new_group()
    recorder = recorders.FlightRecorderHook.attach(group)
    collectives(group)
    recorder.remove()
    assert {"allreduce", "send", "barrier"} <= recorded(group), recorded(group)
    assert not recorded(dist.group.WORLD), recorded(dist.group.WORLD)


def recorded(group):
    """What the recorder has of a group: c10d:allreduce, and from torch 2.15 on, where each backend has a recorder of
    its own, mpi4py:all_reduce; `send 0->1` is a send."""
    dump = recorders._dump_fr_trace_json
    found = json.loads(dump(backend="mpi4py") if "backend" in dump.__doc__.split("\n")[0] else dump())
    names = [one["profiling_name"] for one in found["entries"] if one["process_group"][0] == group.group_name]
    return {name.partition(":")[2].replace("all_reduce", "allreduce").split(" ")[0] for name in names}


def case_what_cpp_is_told(rt):
    group = dist.new_group()
    dist.all_reduce(torch.ones(2), group=group)
    kind: Any = dist.ProcessGroup
    assert kind._get_sequence_number_for_group(group) == 1  # torch's own, which asks the backend inside
    assert kind.group_name.__get__(group) == group.group_name != ""
    assert torch.device("cpu") in kind._device_types.__get__(group)
    assert (kind.rank(group), kind.size(group)) == (rt.rank, rt.size)
    raises(RuntimeError, "no windows", lambda: kind.new_window(group))


def case_a_group_that_was_left_is_let_go(rt):
    group = dist.new_group()
    gone = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert gone() is None


run_cases(globals())
