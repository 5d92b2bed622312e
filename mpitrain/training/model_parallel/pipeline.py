"""`pipeline(stages=K)`: torch's pipeline schedules over our process group, each stage averaged over the pipelines by
DDP.

Invariants: a rank keeps its own stage and forgets the others; the first stage reads the samples, the last one
knows the loss. An incomplete last batch goes through as one microbatch. The idle time of a rank is what
it spends in waiting for the schedule's messages; what travels while it computes costs none.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from mpitrain.checkpoint.tensor_file import Described, describe
from mpitrain.data.read.batch import cut
from mpitrain.devices.moving import move
from mpitrain.errors import UsageError
from mpitrain.model.building.compiling import compile_in_place
from mpitrain.model.building.deferred import held_by
from mpitrain.model.building.pipeline_stages import Stage, keep_only, split_stages
from mpitrain.model.gradient.precision import autocast_forward
from mpitrain.model.metrics import Observed
from mpitrain.model.optimizers.step_hooks import check_whole
from mpitrain.mpi.process_group.process_group import default_group
from mpitrain.reporting.targets import LOSS
from mpitrain.strategies.model_parallel.mesh_layout import Grid
from mpitrain.strategies.model_parallel.pipeline import Pipeline
from mpitrain.system import trace
from mpitrain.torch_versions import make_schedule, without_outputs
from mpitrain.training.measure import build_optimizer
from mpitrain.training.model_parallel.base import SplitStepper, compare_parameters, device_mesh, grid_of
from mpitrain.training.model_parallel.layers import Layers, build_by_layers
from mpitrain.training.model_parallel.loss_proxy import call_with_output, model_inputs
from mpitrain.training.model_parallel.stage_forward import StageForward
from mpitrain.training.model_parallel.trainer import train_split
from mpitrain.training.outcome import RunOutcome
from mpitrain.training.resuming.resume_options import describe_optimizer
from mpitrain.training.session import Session, attempt
from mpitrain.training.synchronous.ddp import data_parallel
from mpitrain.training.synchronous.stepper import Batch, Parts
from mpitrain.training.validations.validation import Part, batches_of, holding, observe, open_validation

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def run_pipeline(session: Session) -> RunOutcome:
    """Train in pipelines; returns what this rank knows of the run."""
    runtime, grid = session.mpi, grid_of(session)
    replica, part = grid.place(runtime.rank)
    runtime.role = f"stage {part} of pipeline {replica}"
    with default_group(runtime):
        made, parameters, described = _build(session, grid, part)
        stepper = PipelineStepper(session, grid, device=session.device, **made)
        return train_split(session, stepper, parameters, described)


def _build(session: Session, grid: Grid, part: int) -> tuple[dict[str, Any], list[str], list[str]]:
    """(arguments for this rank's PipelineStepper, the whole model's parameters and their stages, its optimizer). Every
    rank builds the module on the host, and makes the tensors of its stage alone."""
    runtime, job = session.mpi, session.job
    module, layers = build_by_layers(session, torch.device("cpu"))
    parameters = compare_parameters(runtime, module)
    stages = attempt(runtime, lambda: split_stages(module, grid.num_parts, job.stages))
    owners = {name: index for index, stage in enumerate(stages) for name in stage.names}
    untouched = {
        name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if name not in owners
    }
    _make_stages(layers, stages, grid, runtime.rank)
    layers.share(untouched.values())
    optimizer = attempt(runtime, lambda: build_optimizer(job, module, session.overrides.lr))
    if grid.num_parts > 1:
        attempt(runtime, lambda: check_whole(optimizer, str(session.strategy)))
    described = describe_optimizer(module, optimizer)
    keep_only(optimizer, stages[part].module)
    made = {
        "stage": stages[part],
        "optimizer": optimizer,
        "owners": owners,
        "untouched": {name: tensor.detach() for name, tensor in untouched.items()},
    }
    return made, [f"{entry}, stage {owners.get(entry.split()[0])}" for entry in parameters], described


def _make_stages(layers: Layers, stages: list[Stage], grid: Grid, rank: int) -> None:
    """Collective: every rank makes the tensors of its own stage with the values of rank 0, which makes those of other
    stages for a moment, one after another."""
    own = stages[grid.place(rank)[1]].module
    attempt(layers.runtime, lambda: layers.make(held_by(own)))
    for index, stage in enumerate(stages):
        owners = [row[index] for row in grid.ranks]
        for tensor in held_by(stage.module):
            if rank == 0:
                value = layers.made(tensor).detach().contiguous()
                for owner in owners:
                    if owner != 0:
                        dist.send(value, owner)
            elif rank in owners:
                arrived = torch.empty(tensor.shape, dtype=tensor.dtype)
                dist.recv(arrived, 0)
                tensor.detach().copy_(arrived)


class PipelineStepper(SplitStepper):
    """One stage of one pipeline.

    Args:
        owners: stage of every saved tensor; untouched: what no stage holds.
    """

    holds_still = True

    def __init__(
        self,
        session: Session,
        grid: Grid,
        stage: Stage,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        owners: dict[str, int],
        untouched: dict[str, torch.Tensor],
    ):
        replica, part = grid.place(session.runtime.rank)
        assert isinstance(session.strategy, Pipeline)
        self.strategy = session.strategy
        super().__init__(session, grid, replica, part + 1 == self.strategy.stages, device)
        self.stage, self.owners, self.untouched = stage, owners, untouched
        self.module = move(stage.module, device)
        self.use(optimizer)
        autocast_forward(self.module, session.job.precision, device.type)
        compile_in_place(self.module, session.job.compile)
        mesh = device_mesh(grid, device)
        self.forwarder = StageForward(self.module, mesh.get_group("part"), device)
        self.model: Any = self.module
        trains = any(parameter.requires_grad for parameter in self.module.parameters())
        self.alike = mesh.get_group("replica")  # the ranks that hold the same stage
        if grid.num_replicas > 1 and trains:
            self.model = data_parallel(self.module, self.alike)
        self.schedules: dict[tuple[int, int], Any] = {}
        self.microbatches: list[Batch] = []
        self.weight, self.idle_s, self.busy_s = 1.0, 0.0, 0.0
        trace.watch(self, backward=("microbatches", trace.COMPUTE))

    @property
    def first(self) -> bool:
        """Whether this stage reads the samples."""
        return self.part == 0

    @property
    def holds(self) -> int:
        return self.part

    @property
    def reads(self) -> bool:
        return self.first or self.reports_loss

    def backward(self, parts: Parts, share: int, weight: float) -> float:
        ((batch, _),) = parts
        job, engine = self.session.job, self.session.mpi.engine
        num_microbatches = self.strategy.microbatches if share == job.batch_size else 1
        self.module.train()
        weight *= self.loss_factor
        self.weight = weight
        if self.reports_loss:
            assert batch is not None
            self.microbatches = cut(batch, num_microbatches)
        inputs = None
        if self.first and batch is not None:
            # contiguous, as the shapes that were learnt: torch 2.11 compares strides, too
            inputs = tuple(one.contiguous() for one in model_inputs(self.recipe.gradient.loss, batch))
        schedule = self._schedule(num_microbatches, share, inputs)
        losses: list[torch.Tensor] = []
        options: dict[str, Any] = (
            {"target": torch.arange(num_microbatches), "losses": losses} if self.reports_loss else {}
        )
        options |= without_outputs(schedule)
        began_s, waited_s = time.monotonic(), engine.waited_s
        schedule.step(*(inputs or ()), **options)
        waited_s = engine.waited_s - waited_s
        if self.step >= self.warm_from:
            self.idle_s += waited_s
            self.busy_s += time.monotonic() - began_s - waited_s
        return (
            sum(float(loss.detach()) for loss in losses) / num_microbatches / weight
            if self.reports_loss
            else 0.0
        )

    def _schedule(self, num_microbatches: int, count: int, inputs: Any) -> Any:
        """torch's schedule for batches of `count` samples; it knows the shapes of its messages beforehand."""
        if (num_microbatches, count) not in self.schedules:
            microbatch = (
                tuple(tensor.chunk(num_microbatches)[0] for tensor in inputs) if inputs is not None else None
            )
            taken, returned = self.forwarder.learn_shapes(microbatch)
            stage = PipelineStage(
                self.model,
                self.part,
                self.strategy.stages,
                self.device,
                taken,
                returned,
                group=self.forwarder.group,
            )
            trace.watch(
                stage,
                forward_one_chunk=("forward", trace.COMPUTE),
                backward_one_chunk=("backward", trace.COMPUTE),
            )
            kind = SCHEDULES[
                self.strategy.schedule if num_microbatches == self.strategy.microbatches else "gpipe"
            ]
            self.schedules[num_microbatches, count] = make_schedule(
                kind, stage, num_microbatches, loss_fn=self._loss
            )
        return self.schedules[num_microbatches, count]

    def _loss(self, output: object, index: torch.Tensor) -> torch.Tensor:
        """The weighted loss of one microbatch; torch hands its number where it would hand the target."""
        loss = call_with_output(self.recipe.gradient.loss, output, self.microbatches[int(index)])
        if isinstance(loss, tuple):
            raise UsageError(
                "pipeline: the loss returned (sum, weight), and a microbatch goes backward before the weight of the "
                "others is known; return the mean over the batch, or take allreduce() or sharded()"
            )
        weighted: torch.Tensor = loss if self.weight == 1.0 else loss * self.weight
        return weighted

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.module.parameters() if p.grad is not None]

    def observe(self, prefix: str = "") -> Part:
        """Every pipeline validates its share of the batches."""
        job = self.session.job

        def losses(batch: Batch) -> Observed | None:
            _, output = self.forwarder.forward(model_inputs(job.loss, batch) if self.first else None)
            if not self.reports_loss:
                return None
            loss = call_with_output(job.loss, output, batch)
            observed: Observed = call_with_output(self.metrics.observe, output, batch)
            return Observed({LOSS: loss, **observed.means}, observed.kept)

        # running statistics are each pipeline's own, and those that are saved are the first one's
        buffers = list(self.module.buffers())
        values = [buffer.detach().clone() for buffer in buffers]
        for value in values if self.grid.num_replicas > 1 else ():
            dist.broadcast(value, self.grid.ranks[0][self.part], group=self.alike)
        with open_validation(job, self.session.validation) as reader, holding(buffers, values):
            own = itertools.islice(batches_of(job, reader), self.replica, None, self.grid.num_replicas)
            part = observe(self.module, own, self.device, losses, self.validation_sizes(), prefix=prefix)
        self.forwarder.finish()
        return part

    def described(self) -> dict[str, Described]:
        self._state = self.stage.module.state_dict()
        here = describe({name: self._state[n] for name, n in self.stage.names.items()})
        texts = {name: [str(one.dtype).removeprefix("torch."), one.shape] for name, one in here.items()}
        found = describe(self.untouched)
        for each in self.session.runtime.allgather(texts):
            found |= {n: Described(getattr(torch, dtype), tuple(shape)) for n, (dtype, shape) in each.items()}
        self._described = found
        return found

    def gather(self, name: str) -> torch.Tensor:
        if name in self.untouched:
            return self.untouched[name]
        source = self.grid.ranks[0][self.owners[name]]
        if self.rank == source:
            held: torch.Tensor = self._state[self.stage.names[name]].detach().cpu().contiguous()
            if source != 0:
                dist.send(held, 0)
            return held
        dtype, shape = self._described[name]
        whole = torch.empty(shape if self.rank == 0 else 0, dtype=dtype)
        if self.rank == 0:
            dist.recv(whole, source)
        return whole

    def describe(self) -> dict[str, Any]:
        return {
            "stage": self.part,
            "parameters": self.stage.num_parameters,
            "idle_s": self.idle_s,
            "compute_s": self.busy_s,
            "idle_share": self._idle_share(),
        }

    def conclude(self) -> dict[str, Any]:
        told = self.session.runtime.allgather((self._idle_share(), self.stage.num_parameters))
        by_stage = list(zip(*([told[rank] for rank in row] for row in self.grid.ranks), strict=True))
        return {
            "pipeline": {
                "stages": self.strategy.stages,
                "microbatches": self.strategy.microbatches,
                "schedule": self.strategy.schedule,
                "bubble": self.strategy.bubble,
                "idle_share": [sum(share for share, _ in stage) / len(stage) for stage in by_stage],
                "parameters": [stage[0][1] for stage in by_stage],
            }
        }

    def _idle_share(self) -> float:
        return self.idle_s / max(1e-9, self.idle_s + self.busy_s)
