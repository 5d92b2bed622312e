"""torch's own distributed training over the process group, each compared with one process, on two ranks.

Parameters and inputs are float64; where the order of sums differs the comparison is to 1e-12, elsewhere for equality.
"""

import copy
import socket
import tempfile
import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import mpitrain  # noqa: F401  (this import is all a script needs)
from benchmarks.measuring.gloo import never_destroyed
from mpitrain.mpi.process_group import wire_hooks
from tests.mpi.cases import run_cases, starts

warnings.filterwarnings("ignore", category=FutureWarning)
BATCH, STEPS = 8, 4
groups = {}


def model(dtype=torch.float64):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).to(
        dtype
    )


def batches(dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    shape = (STEPS, BATCH)
    return torch.randn(*shape, 12, generator=generator).to(dtype), torch.randn(
        *shape, 4, generator=generator
    ).to(dtype)


def mine(rt, tensor):
    share = BATCH // rt.size
    return tensor[rt.rank * share : (rt.rank + 1) * share]


def train(module, inputs, targets, cut=lambda tensor: tensor, accumulate=1):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(zip(inputs, targets)):
        last = step % accumulate == accumulate - 1
        with nullcontext() if last or not isinstance(module, DistributedDataParallel) else module.no_sync():
            (module(cut(x)) - cut(y)).square().mean().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in module.parameters()]


def assert_close(ours, serial):
    for one, other in zip(ours, serial, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-13), (one - other).abs().max()


@starts
def case_start(rt):
    """Ours is the default group; gloo's beside it is the peer of lossy hooks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = rt.broadcast(probe.getsockname()[1] if rt.rank == 0 else None)
    store = dist.TCPStore("127.0.0.1", port, rt.size, rt.rank == 0)
    dist.init_process_group("mpi4py", store=store, rank=rt.rank, world_size=rt.size)
    groups["gloo"] = dist.new_group(backend="gloo")
    never_destroyed(groups["gloo"])


def case_ddp_accumulates_without_sync(rt):
    """no_sync over two batches, small buckets: the same as one process with both batches."""
    serial = train(model(), *batches(), accumulate=2)
    parallel = DistributedDataParallel(model(), bucket_cap_mb=1e-4)
    assert_close(train(parallel, *batches(), lambda t: mine(rt, t), accumulate=2), serial)


class Branches(nn.Module):
    """Uses one of its branches only; which one depends on the step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right = nn.Linear(12, 4).double(), nn.Linear(12, 4).double()
        self.step = 0

    def forward(self, x):
        self.step += 1
        return (self.left if self.step % 2 else self.right)(x)


def case_ddp_with_unused_parameters(rt):
    """find_unused_parameters: some get no gradient in a step."""
    serial = train(Branches(), *batches())
    parallel = DistributedDataParallel(Branches(), find_unused_parameters=True)
    assert_close(train(parallel, *batches(), lambda t: mine(rt, t)), serial)


def case_ddp_broadcasts_buffers(rt):
    """Running statistics are rank 0's everywhere before each forward pass."""
    norm = nn.BatchNorm1d(12).double()
    parallel = DistributedDataParallel(norm)
    x, _ = batches()
    for inputs in x:
        parallel(mine(rt, inputs)).sum().backward()
    seen = [None] * rt.size
    with torch.no_grad():
        parallel(mine(rt, x[0]))
    lone = nn.BatchNorm1d(12).double()
    for inputs in (*x, x[0]):
        lone(inputs[: BATCH // rt.size])
    dist.all_gather_object(seen, norm.running_mean.tolist())
    if rt.rank == 0:
        assert torch.equal(norm.running_mean, lone.running_mean)
    assert int(norm.num_batches_tracked) == STEPS + 1


def case_torch_hooks_do_what_they_do_over_gloo(rt):
    """fp16 compression and PowerSGD: the same bits as over gloo."""
    for name in ("fp16", "powersgd"):
        trained = []
        for group in (dist.group.WORLD, groups["gloo"]):
            parallel = DistributedDataParallel(model(torch.float32), process_group=group)
            if name == "fp16":
                parallel.register_comm_hook(group, default_hooks.fp16_compress_hook)
            else:
                state = powerSGD_hook.PowerSGDState(
                    group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
                )
                parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            trained.append(train(parallel, *batches(torch.float32), lambda t: mine(rt, t)))
        for one, other in zip(*trained):
            assert torch.allclose(one, other, rtol=1e-6, atol=1e-7), (name, (one - other).abs().max())


def case_our_sixteen_bit_hook(rt):
    """The mean of gradients rounded to bfloat16, added in float32: one bucket against the formula."""
    parallel = DistributedDataParallel(model(torch.float32))
    parallel.register_comm_hook(None, wire_hooks.bfloat16_wire)
    x, y = batches(torch.float32)
    (parallel(mine(rt, x[0])) - mine(rt, y[0])).square().mean().backward()
    lone = model(torch.float32)
    grads = []
    for rank in range(rt.size):
        share = slice(rank * BATCH // rt.size, (rank + 1) * BATCH // rt.size)
        lone.zero_grad()
        (lone(x[0][share]) - y[0][share]).square().mean().backward()
        grads.append([p.grad.clone().bfloat16().float() for p in lone.parameters()])
    for parameter, *each in zip(parallel.parameters(), *grads):
        total = each[0].clone()
        for other in each[1:]:
            total += other
        assert torch.equal(parameter.grad, (total / rt.size).bfloat16().float())


def case_fsdp2_equals_one_process(rt):
    """fully_shard, layer by layer; then distributed checkpoint, saved and loaded into another model."""
    serial = train(model(), *batches())
    sharded = model()
    mesh = init_device_mesh("cpu", (rt.size,))
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    train(sharded, *batches(), lambda t: mine(rt, t))
    assert_close([parameter.full_tensor() for parameter in sharded.parameters()], serial)
    folder = rt.broadcast(tempfile.mkdtemp() if rt.rank == 0 else None)
    state = {"model": sharded.state_dict(), "step": STEPS}
    checkpoint.save(state, checkpoint_id=folder)
    fresh = copy.deepcopy(model())
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    fully_shard(fresh, mesh=mesh)
    loaded = {"model": fresh.state_dict(), "step": 0}
    checkpoint.load(loaded, checkpoint_id=folder)
    assert loaded["step"] == STEPS
    for one, other in zip(fresh.parameters(), sharded.parameters()):
        assert torch.equal(one.full_tensor(), other.full_tensor())


def case_tensor_parallel_equals_one_process(rt):
    """One layer split by columns, the next by rows; every rank sees the whole batch."""
    serial = train(model(), *batches())
    split = parallelize_module(
        model(), init_device_mesh("cpu", (rt.size,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    train(split, *batches())
    ours = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in split.parameters()]
    assert_close([parameter.detach() for parameter in ours], serial)


if __name__ == "__main__":
    run_cases(globals())
