"""What every model-parallel run has in common: the loop over global batches, shared out among replicas.

Invariants: all ranks take the same steps in the same order. The global order of the samples is cut into
global batches and each replica takes its contiguous share; an incomplete last batch is shared evenly and weighted,
so that it, too, is the mean over its samples. Whether a step is finite is agreed on by one small allreduce, because
the ranks see different gradients; it also adds up the norm by which the mean gradient is clipped. Of a checkpoint each
rank of the first replica writes the part it holds, and every rank goes on from the part of a rank that held the same.
How a share becomes gradients is the subclass's business.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from mpitrain.checkpoint.tensor_file import Described, order_of
from mpitrain.errors import OutputError, UsageError
from mpitrain.job import EMA_PREFIX
from mpitrain.messages import Lease
from mpitrain.model.accumulation import LeaseReader, read_alike
from mpitrain.model.flat import all_finite
from mpitrain.model.in_place import held_alike
from mpitrain.model.optimizer import Rates
from mpitrain.reporting.targets import check_targets
from mpitrain.strategies.model_parallel.base import Split
from mpitrain.strategies.model_parallel.mesh_layout import Grid
from mpitrain.strategies.sampling.dealer import check_batch_size, share_out
from mpitrain.system import trace
from mpitrain.training.averaged_model import EMA_MODEL_FILE
from mpitrain.training.judge import why_not_finite
from mpitrain.training.measure import MODEL_FILE, Meter, num_warmup, save_one_by_one
from mpitrain.training.model_parallel.state_shards import local, restore_shards, take_shards
from mpitrain.training.replica_guard import ReplicaGuard
from mpitrain.training.resume import restoring
from mpitrain.training.schedule import go_on, report_end_of
from mpitrain.training.session import Session, attempt
from mpitrain.training.synchronous.allreduce_record import settle_allreduce
from mpitrain.training.synchronous.checkpoints import StepCheckpoints
from mpitrain.training.synchronous.stepper import Batch, Parts, Stepper
from mpitrain.training.validation import Part, conclude, metrics_of
from mpitrain.training.validation_parts import gather_parts

if TYPE_CHECKING:
    from mpitrain.mpi.runtime import Runtime

_COUNTS = ("epoch", "cursor", "step", "samples", "nonfinite", "left_out")


class SplitRun(Stepper):
    """One rank of a model-parallel run.

    Args:
        grid: everybody's place; share: which of the step's batches is this rank's; reports_loss: whether this
            rank reports the loss of its share.
    """

    leases: LeaseReader
    holds_still = False  # whether a step leaves the parameters as they are until its update

    def __init__(self, session: Session, grid: Grid, share: int, reports_loss: bool, device: torch.device):
        job, num_samples = session.job, session.catalogue.num_samples
        num_replicas = session.strategy.num_replicas(session.runtime.size)
        super().__init__(job, num_replicas, num_samples, session.runtime.rank, session.runtime.where)
        self.session, self.grid, self.share, self.reports_loss, self.device = (
            session,
            grid,
            share,
            reports_loss,
            device,
        )
        self.rank = session.runtime.rank
        self.metrics = metrics_of(job)
        self.replica, self.part = grid.place(self.rank)
        per_epoch = -(-num_samples // (job.step_samples * num_replicas))
        self.num_steps = session.overrides.steps or per_epoch * job.epochs
        self.meter = Meter(session.report, num_warmup(self.num_steps))
        self.epoch = self.cursor = self.left_out = 0
        trace.watch_steps(self, "take")
        self.checkpoint_grid = grid  # ranks in one column write the same; a row is all parts of the model

    # ---- what subclasses do

    def observe(self, prefix: str = "") -> Part:
        """What this rank's share of the validation set gives, where it is this rank's to report; collective. `prefix`:
        of the names."""
        raise NotImplementedError

    def described(self) -> dict[str, Described]:
        """The whole model's tensors by their original names, the same on all ranks; collective."""
        raise NotImplementedError

    def gather(self, name: str) -> torch.Tensor:
        """One of those that `described` has named, whole on rank 0; collective."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """What belongs in this rank's row of `result.json`."""
        return {}

    def conclude(self) -> dict[str, Any]:
        """What belongs in `result.json` besides; collective."""
        return {}

    # ---- the loop

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        """Step with this optimizer, which holds this rank's parameters."""
        self.optimizer, self.rates = optimizer, Rates(optimizer)
        self.updates = attempt(self.session.runtime, lambda: self.recipe.update.begin(self.rates, self._held))

    @property
    def reads(self) -> bool:
        """Whether this rank needs the samples."""
        return True

    def run(self, parameters: list[str], optimizer: list[str]) -> dict[str, Any]:
        """Epochs until all are done, `--steps` is reached, a step is not finite or the run is asked to end; then the
        outcome. `parameters`: names and shapes of the whole model's, and how they are split; optimizer: its class and
        groups, as the job made it.
        """
        job = self.session.job
        settle_allreduce(self.session)
        still = self.module if self.holds_still else None
        self.checkpoints = StepCheckpoints(
            self.session, parameters, optimizer, dict, self.own, self.checkpoint_grid, still
        )
        self.before_update = self._begin_update
        self.replicas = ReplicaGuard(
            self.session.runtime, self.session.strategy, self._alike, self.session.report.event,
            part=self.checkpoint_grid.place(self.rank)[1],
        )  # fmt: skip
        self.checkpoints.before_writing = self._compare
        if (
            saved := self.checkpoints.restored_part(self.session, self.checkpoint_grid.place(self.rank)[1])
        ) is not None:
            attempt(self.session.runtime, restoring(self.session.resume)(lambda: self.restore(saved)))
        attempt(self.session.runtime, self.checkpoints.try_out)
        report_end_of(self.session, self.updates.pace)
        trace.watch(self, _look_at_validation=("validate", trace.OTHER))
        trace.watch(self.meter, progress=("report", trace.OTHER))
        trace.watch(self.checkpoints, after_step=("settle", trace.OTHER))
        self._begin_validations()
        with job.data.reader(self.session.catalogue, job.seed) as reader:
            self.leases = LeaseReader(reader.batch, reader.prefetch, job.part_samples)
            limited = self.session.overrides.steps is not None
            while self._goes_on:
                left = self._epoch(self.epoch, limited)
                if self._over:
                    break
                with self.checkpoints.guard.changing():
                    self.left_out, self.epoch, self.cursor = self.left_out + left, self.epoch + 1, 0
                if self._goes_on:
                    self._look_at_validation(self.epoch)
        return self._outcome()

    def _alike(self) -> list[tuple[str, torch.Tensor]]:
        """What this rank holds, and those of the other replicas that hold the same part."""
        return [(name, local(one)) for name, one in held_alike(self.module)]

    def _compare(self, look: Callable[[], None] | None = None) -> None:
        """Whether the replicas, if there are several, hold the same."""
        if self.checkpoint_grid.num_replicas > 1 and not self.failure:
            attempt(self.session.runtime, look or self.replicas.compare)

    def _begin_update(self) -> None:
        self.checkpoints.guard.begin()

    @property
    def _goes_on(self) -> bool:
        limited, epochs = self.session.overrides.steps is not None, self.session.job.epochs
        return not self._over and (self.step < self.num_steps if limited else self.epoch < epochs)

    @property
    def _over(self) -> bool:
        return bool(self.failure) or self.checkpoints.ended

    def own(self) -> dict[str, Any]:
        """What this rank goes on from: its part of the model and of the optimizer, and where the run is."""
        ema = {"ema": self.updates.ema.state()} if self.updates.ema is not None else {}
        return (
            take_shards(self.module, self.rates)
            | ema
            | {"counts": {key: getattr(self, key) for key in _COUNTS}}
            | self.updates.pace.state(self.samples)
        )

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from what `own` returned, here or on a rank that held the same part."""
        resume, now = self.session.resume, self.session.job.step_samples
        if resume is not None:
            before, counts = resume.about["batch_size"], saved["counts"]
            left = self.session.catalogue.num_samples - counts["cursor"]
            is_over = left < self.num_replicas or (
                self._drops_last(before) and left < before * self.num_replicas
            )
            check_batch_size(before, now, counts["epoch"], is_over or counts["cursor"] == 0)
        restore_shards(self.module, self.rates, saved)
        if self.updates.ema is not None:
            self.updates.ema.restore(saved.get("ema"))
        vars(self).update(saved["counts"])
        go_on(self.session, self.updates.pace, saved.get("ticks"), self.samples)
        warmup = num_warmup(self.num_steps - self.step)
        self.meter = Meter(self.session.report, warmup, self.samples, self.step)

    def _drops_last(self, batch_size: int) -> bool:
        """Whether an incomplete last step is left out; never where an epoch has no complete one."""
        job, num_samples = self.session.job, self.session.catalogue.num_samples
        return job.drop_last and num_samples >= batch_size * self.num_replicas

    def _epoch(self, epoch: int, limited: bool) -> int:
        """Steps to the end of the epoch; returns how many samples of it are left out."""
        num_samples, job = self.session.catalogue.num_samples, self.session.job
        batch = job.step_samples * self.num_replicas
        while self.cursor < num_samples and not self._over and not (limited and self.step >= self.num_steps):
            cursor = self.cursor
            count: int = min(batch, num_samples - cursor)
            if count < self.num_replicas or (count < batch and self._drops_last(job.step_samples)):
                return count
            following = min(batch, num_samples - cursor - count)
            if following >= self.num_replicas and self.reads:
                self.leases.announce(
                    Lease(epoch, *share_out(cursor + count, following, self.num_replicas, self.share))
                )
            self._one_step(epoch, cursor, count)
            self._compare(self.replicas.after_step)
            self.cursor += count
            self.checkpoints.after_step(self.step, self.samples)
            if self._goes_on:
                self._look_at_validation(epoch + 1)
        return 0

    def _one_step(self, epoch: int, cursor: int, count: int) -> None:
        self.session.runtime.step = self.step
        start, share = share_out(cursor, count, self.num_replicas, self.share)
        loss = self.take(self._parts(Lease(epoch, start, share), count), share, count)
        self.meter.progress(self.samples, self.step, epoch + 1, loss)

    def _parts(self, lease: Lease, count: int) -> Parts:
        """This rank's batches of a step of `count` samples, as many on all ranks."""
        if not self.reads:
            yield None, lease.num_samples
            return
        for batch, num_samples in read_alike(self.leases, lease, -(-count // self.num_replicas)):
            yield self._on_device(batch), num_samples

    def _on_device(self, batch: Batch) -> Batch:
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    def judge(self, value: float, part: float) -> tuple[float, bool]:
        """(the mean loss of the step, whether everything is finite), the same on all ranks."""
        grads = self.gradients()
        finite = value - value == 0.0 and all_finite(grads)
        squares = self._squares() if finite and self.recipe.update.clipping.norm is not None else 0.0
        sums = torch.tensor(
            [value * part if self.reports_loss else 0.0, 0.0 if finite else 1.0, squares], dtype=torch.float64
        )
        dist.all_reduce(sums)
        loss, bad, squares = sums.tolist()
        self._norm = math.sqrt(squares)
        return loss, bad == 0.0

    def is_finite(self, gradients: list[torch.Tensor]) -> bool:
        """As `Stepper.is_finite`; ranks see different gradients."""
        overflown = torch.tensor([0.0 if all_finite(gradients) else 1.0])
        dist.all_reduce(overflown)
        return not overflown

    def num_copies(self, gradient: torch.Tensor) -> int:
        """How many ranks hold what this rank holds of a gradient."""
        return self.num_replicas

    def _why_not_finite(self) -> str:
        why = why_not_finite((name, local(one)) for name, one in self.module.named_parameters())
        return f"rank {self.rank}: {why}" if why else ""

    def _held(self) -> list[torch.Tensor]:
        groups = self.optimizer.param_groups
        return [local(parameter).detach() for group in groups for parameter in group["params"]]

    def _stepped(self) -> list[torch.Tensor]:
        """The gradients of what this rank's optimizer holds, as they are split."""
        held = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        return [parameter.grad for parameter in held if parameter.grad is not None]

    def _squares(self) -> float:
        """This rank's part of the squared norm of the mean gradient."""
        gradient = self._stepped()
        norms = torch._foreach_norm([local(one) for one in gradient]) if gradient else []
        pairs = zip(norms, gradient, strict=True)
        return sum(float(norm) ** 2 / self.num_copies(one) for norm, one in pairs)

    def clip(self) -> None:
        """As `Stepper.clip`, by the norm over all ranks."""
        total = torch.tensor(self._norm, dtype=torch.float64)
        self.updates.shape(lambda: [local(one) for one in self._stepped()], total=total)

    def _begin_validations(self) -> None:
        """All ranks measure together, so all judge what they have measured, and the first keeps the files."""
        validations = self.validations = self.session.validations(steps_end_it=True)
        validations.writes = self.rank == 0
        validations.adopt(self.session.runtime.broadcast(validations.record if self.rank == 0 else None))
        validations.begin(self.epoch, self.samples)
        if validations.counts_seconds:
            validations.agreed = self.checkpoints.validates_now
            self.checkpoints.wants_validation = validations.time_is_up
        self._look_at_end()

    def _look_at_validation(self, epoch: int) -> None:
        """Validate, where it is time to; `epoch` is the one to report, counted from 1."""
        if self.session.validation is None:
            return
        if self.validations.is_due(self.epoch, self.samples):
            self.session.runtime.barrier()  # others may still be training, and waiting for them is no pause
            self._compare()
            self.meter.validation(self._judged, epoch, self.samples)
            self._look_at_end()

    def _judged(self) -> dict[str, float]:
        metrics = self.measure()
        attempt(self.session.runtime, lambda: self.validations.check(metrics))
        self.validations.take(metrics, self.samples, self._save_chosen)
        return metrics

    def _save_chosen(self, path: Path, metadata: dict[str, str]) -> None:
        """Write the model that the best metric was measured of; collective."""
        best_by = self.session.job.best_by
        of_average = self.updates.ema and best_by is not None and best_by.metric.startswith(EMA_PREFIX)
        with self.updates.ema.swapped() if self.updates.ema and of_average else contextlib.nullcontext():
            self._save(path, metadata)

    def _save(self, path: Path, metadata: dict[str, str]) -> None:
        """Write the whole model, of which rank 0 holds one tensor at a time; collective."""
        described = self.described()
        left = order_of(described)

        def gather(name: str) -> torch.Tensor:
            left.remove(name)
            return self.gather(name)

        try:
            if self.rank == 0:
                save_one_by_one(described, gather, path, metadata)
            else:
                while left:
                    gather(left[0])
        except OutputError:  # the other ranks send all of it, also where rank 0 can write no more
            while left:
                gather(left[0])
            raise

    def _look_at_end(self) -> None:
        if self.validations.may_end:
            self.checkpoints.end_early(self.validations.over, self.samples)

    def measure(self) -> dict[str, float]:
        """Validation metrics, on every rank; collective."""
        job, runtime = self.session.job, self.session.runtime
        part = self.observe()
        if self.updates.ema is not None and job.validate_ema:
            with self.checkpoints.guard.changing(), self.updates.ema.swapped():
                part += self.observe(EMA_PREFIX)
        rows = gather_parts(runtime, part)

        def summed_up() -> dict[str, float]:
            metrics = conclude(self.metrics, rows) if self.rank == 0 else {}
            check_targets(job.target if self.rank == 0 else {}, metrics)
            return metrics

        return dict(runtime.broadcast(attempt(runtime, summed_up)))

    def _outcome(self) -> dict[str, Any]:
        if not self.failure:
            self.checkpoints.finish(self.samples)
        self.checkpoints.writer.wait()
        if not self.checkpoints.ended:
            self._compare()
        path = self.session.run_dir / MODEL_FILE
        metadata = {"strategy": str(self.session.strategy), "job": self.session.job.name or ""}
        self._save(path, metadata)
        if self.updates.ema is not None:
            with self.updates.ema.swapped():
                self._save(self.session.run_dir / EMA_MODEL_FILE, metadata)
        metrics = {}
        if self.session.validation is not None:
            metrics = self.measure() if self.checkpoints.ended else self._judged()
        concluded = self.conclude()
        detail = {"rank": self.rank, "role": "worker", "replica": self.replica, "part": self.part}
        outcome: dict[str, Any] = {
            "detail": {**detail, "steps": self.step, **self.describe()},
            "failure": self.failure or self._why_not_finite(),
            "requeue": self.checkpoints.ended,
            "unwritten": self.checkpoints.writer.unwritten,
        }
        if self.checkpoint_grid.place(self.rank)[0] == 0:
            outcome["detail"]["checkpoints"] = self.checkpoints.writer.summary()
        if self.rank == 0:
            counts = {
                "accepted": self.step - self.nonfinite,
                "nonfinite": self.nonfinite,
                "samples_left_out": self.left_out,
                "replicas": self.grid.num_replicas,
            }
            outcome["result"] = {
                **self.meter.result(), **counts, **concluded, **self.validations.result(), "metrics": metrics,
                "model": str(path),
            }  # fmt: skip
        return outcome


def grid_of(session: Session) -> Grid:
    """Everybody's place in this run."""
    assert isinstance(session.strategy, Split)
    return session.strategy.grid(session.runtime.nodes)


def device_mesh(grid: Grid, device: torch.device) -> Any:
    """torch's mesh of the grid, with dimensions "replica" and "part"."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh(device.type, torch.tensor(grid.ranks), mesh_dim_names=("replica", "part"))


def compare_parameters(runtime: Runtime, module: nn.Module) -> list[str]:
    """All ranks have built the same model, or all leave; returns its parameters' names and shapes."""
    parameters = [f"{name} {tuple(p.shape)}" for name, p in module.named_parameters()]
    runtime.compare({"parameters": parameters})

    def check() -> None:
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise UsageError("the model has no parameter that requires a gradient: nothing to train")

    attempt(runtime, check)
    return parameters
