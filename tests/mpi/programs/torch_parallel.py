"""What torch builds on process groups (DTensor, FSDP2, tensor and sequence parallelism, pipeline schedules, sharded
checkpoints) over mpi4py and over gloo, on four ranks: the same numbers. torch's own tests of these are not in its
wheel; these samples ask for what those do."""

import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.measuring.gloo import never_destroyed
from tests.mpi.cases import run_cases, starts

warnings.filterwarnings("ignore", category=FutureWarning)
BACKENDS = ("gloo", "mpi4py")
meshes = {}


@starts
def case_start(rt):
    dist.init_process_group("mpi4py")
    for shape, names in (((4,), ("all",)), ((2, 2), ("row", "column"))):
        meshes["mpi4py", shape] = init_device_mesh("cpu", shape, mesh_dim_names=names)
        ranks = torch.arange(4).view(shape)
        own = []
        for dim in range(len(shape)):
            for line in ranks.movedim(dim, -1).reshape(-1, shape[dim]).tolist():
                group = dist.new_group(line, backend="gloo")
                never_destroyed(group)
                own += [group] if rt.rank in line else []
        meshes["gloo", shape] = DeviceMesh.from_group(
            own if len(own) > 1 else own[0], "cpu", mesh=ranks, mesh_dim_names=names
        )


def same_over_both(run, *arguments, rtol=0.0):
    """`run(backend, ...)` returns tensors, the same over both backends; exactly, or to `rtol`."""
    gloo, ours = (run(backend, *arguments) for backend in BACKENDS)
    assert len(gloo) == len(ours) > 0
    for theirs, mine in zip(gloo, ours):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol)
    return ours


def seeded(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def case_dtensors_are_redistributed(rt):
    """Uneven shards, every placement to every other one."""
    whole = seeded(7, 9)

    def run(backend):
        mesh, results = meshes[backend, (4,)], []
        for before in (Shard(0), Shard(1), Replicate()):
            tensor = distribute_tensor(whole.clone(), mesh, [before])
            for after in (Shard(0), Shard(1), Replicate()):
                moved = tensor.redistribute(placements=[after])
                assert torch.equal(moved.full_tensor(), whole)
                results.append(moved.to_local())
        terms = DTensor.from_local(whole * (rt.rank + 1), mesh, [Partial()], run_check=False)
        return [*results, *(terms.redistribute(placements=[p]).to_local() for p in (Shard(0), Shard(1)))]

    same_over_both(run, rtol=1e-12)


def case_dtensors_on_two_dimensions_multiply(rt):
    def run(backend):
        mesh = meshes[backend, (2, 2)]
        left = distribute_tensor(seeded(8, 6), mesh, [Shard(0), Replicate()]).requires_grad_()
        right = distribute_tensor(seeded(6, 10), mesh, [Replicate(), Shard(1)])
        product = left @ right
        product.sum().backward()
        assert left.grad is not None
        return [whole_of(product), whole_of(left.grad)]

    product, _ = same_over_both(run, rtol=1e-12)
    torch.testing.assert_close(product, seeded(8, 6) @ seeded(6, 10))


class Block(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def blocks(count, dtype=torch.float64):
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(count)), nn.Linear(12, 8)).to(dtype)


def train(module, steps, rank, dtype=torch.float64):
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(steps):
        module(seeded(4, 4, 12)[rank].to(dtype)).square().mean().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def full(module):
    return [whole_of(value) for value in module.state_dict().values()]


def whole_of(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def case_fsdp2_on_one_and_two_dimensions(rt):
    def run(backend, shape, policy, dtype):
        module = blocks(2, dtype)
        for block in module:
            fully_shard(block, mesh=meshes[backend, shape], mp_policy=policy)
        fully_shard(module, mesh=meshes[backend, shape], mp_policy=policy)
        train(module, 3, rt.rank, dtype)
        return [value.detach() for value in full(module)]

    for shape in ((4,), (2, 2)):
        same_over_both(run, shape, MixedPrecisionPolicy(), torch.float64, rtol=1e-10)
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        same_over_both(run, shape, mixed, torch.float32, rtol=2e-2)


def case_tensor_and_sequence_parallel_with_a_parallel_loss(rt):
    def run(backend):
        mesh = meshes[backend, (4,)]
        module = blocks(1)
        plan = {
            "0.norm": SequenceParallel(),
            "0.up": PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=False
            ),
            "0.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            "1": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(module[0].up, mesh, ColwiseParallel(input_layouts=Replicate()))
        parallelize_module(module, mesh, plan)
        x = distribute_tensor(seeded(2, 8, 12), mesh, [Shard(1)])
        with loss_parallel():
            loss = nn.functional.cross_entropy(module(x).flatten(0, 1), torch.arange(16) % 8)
            loss.backward()
        grads = [each.grad for each in module.parameters() if each.grad is not None]
        return [
            whole_of(loss).detach(), *map(whole_of, grads)
        ]  # fmt: skip

    loss, *_ = same_over_both(run, rtol=1e-10)
    serial = nn.functional.cross_entropy(blocks(1)(seeded(2, 8, 12)).flatten(0, 1), torch.arange(16) % 8)
    torch.testing.assert_close(loss, serial.detach())


def case_pipeline_schedules(rt):
    def run(backend, schedule, num_local):
        group = meshes[backend, (4,)].get_group()
        layers = list(blocks(8))
        layers[-2:] = [nn.Sequential(layers[-2], layers[-1])]
        num_stages = 4 * num_local
        per_stage = len(layers) // num_stages
        mine = [rt.rank + 4 * turn for turn in range(num_local)]
        parts = [nn.Sequential(*layers[s * per_stage : (s + 1) * per_stage]) for s in mine]
        stages = [
            PipelineStage(part, s, num_stages, torch.device("cpu"), group=group)
            for part, s in zip(parts, mine)
        ]

        def loss(output, target):
            return (output - target).square().mean()

        steps = schedule(stages if num_local > 1 else stages[0], n_microbatches=4, loss_fn=loss)
        losses: list[torch.Tensor] = []
        first = (seeded(8, 12),) if rt.rank == 0 else ()
        last = {"target": seeded(8, 8), "losses": losses} if rt.rank == 3 else {}
        steps.step(*first, **last)
        return [*losses, *(each.grad for part in parts for each in part.parameters())]

    for schedule, num_local in ((ScheduleGPipe, 1), (Schedule1F1B, 1), (ScheduleInterleaved1F1B, 2)):
        found = same_over_both(run, schedule, num_local)
        if rt.rank == 3:
            whole = nn.functional.mse_loss(blocks(8)(seeded(8, 12)), seeded(8, 8))
            torch.testing.assert_close(torch.stack([each.detach() for each in found[:4]]).mean(), whole)


def case_a_checkpoint_of_one_mesh_is_read_on_another(rt):
    """Over both backends, each reading what the other has written."""
    folders = [tempfile.mkdtemp() if rt.rank == 0 else "" for _ in BACKENDS]
    folders = rt.broadcast(folders)

    def sharded(backend, shape):
        module = fully_shard(blocks(2), mesh=meshes[backend, shape])
        return module, torch.optim.AdamW(module.parameters(), lr=1e-2)

    written = []
    for backend, folder in zip(BACKENDS, folders):
        module, _ = sharded(backend, (4,))
        optimizer = train(module, 2, rt.rank)
        model_state, optimizer_state = get_state_dict(module, optimizer)
        group = meshes[backend, (4,)].get_group()
        checkpoint.save(
            {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder, process_group=group
        )
        written.append([value.detach() for value in full(module)])
    for backend, folder, before in zip(BACKENDS, reversed(folders), reversed(written)):
        module, optimizer = sharded(backend, (2, 2))
        model_state, optimizer_state = get_state_dict(module, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        checkpoint.load(state, checkpoint_id=folder, process_group=meshes[backend, (4,)].get_group())
        set_state_dict(
            module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        for now, then in zip(full(module), before):
            assert torch.equal(now.detach(), then)
        assert len(optimizer.state) == len(list(module.parameters()))


run_cases(globals())
