"""Device tensors over the process group, read by MPI itself or by way of the host: equal to what host tensors become,
however late the device computes them.

The numbers are small integers, exact in every dtype, so comparisons are for equality.
"""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mpitrain  # noqa: F401  (this import is all a script needs)
from mpitrain.devices import accelerator
from mpitrain.mpi.memory.device_aware import gpu_aware
from tests.devices import tested
from tests.mpi.cases import run_cases, starts

warnings.filterwarnings("ignore", category=FutureWarning)
COUNTS = (1, 7, 5003, 300_001)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
KIND = tested.kind()
DEVICE = torch.device(KIND, 0)
# Elements of a side: products of some milliseconds. The simulated accelerator is late by itself.
LATE = 30 if tested.is_simulated() else 3000


def values(rank, count, dtype, salt=0):
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randint(0, 4, (count,), generator=generator).to(dtype)


def late(tensor):
    """An equal tensor that the device has after some milliseconds of products that it has to do first."""
    wide = torch.eye(LATE, device=DEVICE)
    for _ in range(12):
        wide = wide @ wide
    return tensor + (wide[0, 0] - 1).to(tensor.dtype)


@starts
def case_the_group_begins(rt):
    accelerator.make_current(DEVICE)
    dist.init_process_group("mpi4py")
    if rt.rank == 0:
        print("device tensors:", gpu_aware()[1])


def moved(rt, one):
    """Every operation on this rank's tensor, as a list of tensors where it lies."""
    size, rank, found = rt.size, rt.rank, []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        found.append(one.clone())
        dist.all_reduce(found[-1], op)
    found.append(one.clone())
    dist.broadcast(found[-1], size - 1)
    gathered = [torch.empty_like(one) for _ in range(size)]
    dist.all_gather(gathered, one)
    flat = one.new_empty(size * one.numel())
    dist.all_gather_into_tensor(flat, one)
    scattered = torch.empty_like(one)
    dist.reduce_scatter_tensor(scattered, flat)
    swapped = torch.empty_like(flat)
    dist.all_to_all_single(swapped, flat * (rank + 1))
    sent, got = one.contiguous(), torch.empty_like(one)
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, (rank + 1) % size),
            dist.P2POp(dist.irecv, got, (rank - 1) % size),
        ]
    ):
        work.wait()
    return [*found, *gathered, flat, scattered, swapped, got]


def case_device_tensors_become_what_host_tensors_do(rt):
    for dtype in DTYPES:
        for count in COUNTS:
            one = values(rt.rank, count, dtype)
            for host, device in zip(moved(rt, one), moved(rt, one.to(DEVICE)), strict=True):
                assert accelerator.is_on_device(device) and torch.equal(device.cpu(), host), (dtype, count)


def case_strided_device_tensors_are_written_in_place(rt):
    base = torch.zeros(6, 8, device=DEVICE)
    base[:, ::2] = rt.rank + 1.0
    dist.all_reduce(base[:, ::2])
    total = rt.size * (rt.size + 1) / 2
    assert base[:, ::2].eq(total).all() and not base[:, 1::2].any()


def case_nothing_travels_before_the_device_has_it(rt):
    """Also from and to a stream of its own, with works that are waited for later."""
    one = values(rt.rank, 5003, torch.float32)
    total = one.clone()
    dist.all_reduce(total)
    for stream in (torch.accelerator.current_stream(DEVICE), torch.Stream(DEVICE)):
        with stream:
            device = late(one.to(DEVICE))
            dist.all_reduce(device)
            assert torch.equal(device.cpu(), total)
            device = late(one.to(DEVICE))
            work = dist.all_reduce(device, async_op=True)
            work.wait()
            doubled = device * 2  # reads what has arrived
            assert torch.equal(doubled.cpu(), 2 * total)
            device = late(one.to(DEVICE))
            got = late(torch.zeros_like(device))  # written late, before it is received into
            works = [
                dist.irecv(got, (rt.rank - 1) % rt.size),
                dist.isend(device, (rt.rank + 1) % rt.size),
            ]
            for work in works:
                work.wait()
            assert torch.equal(got.cpu(), values((rt.rank - 1) % rt.size, 5003, torch.float32))


def model():
    torch.manual_seed(1)
    return (
        nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
        .double()
        .to(DEVICE)
    )


def batches():
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(12, 12, generator=generator).double().to(DEVICE) for _ in range(5)]


def train(module, cut=lambda x: x):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for x in batches():
        module(cut(x)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module


def mine(rt):
    share = 12 // rt.size
    return lambda x: x[rt.rank * share : (rt.rank + 1) * share]


def case_ddp_is_one_process(rt):
    serial = train(model())
    ours = train(DistributedDataParallel(model(), device_ids=[0], bucket_cap_mb=0.01), mine(rt)).module
    for one, other in zip(ours.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def case_fsdp2_is_one_process(rt):
    mesh = init_device_mesh(KIND, (rt.size,))
    module = model()
    for layer in module:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    train(module, mine(rt))
    for one, other in zip(module.parameters(), train(model()).parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-12, atol=1e-12)


def case_the_group_ends(rt):
    dist.destroy_process_group()


run_cases(globals())
