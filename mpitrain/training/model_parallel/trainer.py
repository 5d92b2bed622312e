"""A model-parallel run: the synchronous one, of a model whose parts ranks hold.

Invariants: all ranks take the same steps in the same order. The global order of the samples is cut into global batches,
and each replica takes its contiguous share; an incomplete last batch is shared evenly and weighted, so that it, too, is
the mean over its samples. Of a checkpoint each rank of the first replica writes the part it holds, and every rank goes
on from the part of a rank that held the same. Measuring and saving take all ranks.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from mpitrain.checkpoint.tensor_file import order_of
from mpitrain.errors import OutputError
from mpitrain.job import EMA_PREFIX
from mpitrain.model.in_place import held_alike
from mpitrain.reporting.targets import check_targets
from mpitrain.training.measure import save_one_by_one
from mpitrain.training.model_parallel.base import SplitStepper
from mpitrain.training.model_parallel.state_shards import local, restore_shards, take_shards
from mpitrain.training.outcome import RunOutcome
from mpitrain.training.replica_guard import Named
from mpitrain.training.session import Session, attempt
from mpitrain.training.synchronous.allreduce_record import settle_allreduce
from mpitrain.training.synchronous.checkpoints import StepCheckpoints
from mpitrain.training.synchronous.trainer import Trainer
from mpitrain.training.validations.judge import divergence
from mpitrain.training.validations.validation import conclude
from mpitrain.training.validations.validation_parts import gather_parts


def train_split(
    session: Session, stepper: SplitStepper, parameters: list[str], optimizer: list[str]
) -> RunOutcome:
    """Train with these steps; returns what this rank knows of the run. `parameters`: names and shapes of the whole
    model's, and how they are split; optimizer: its class and groups, as the job made it."""
    settle_allreduce(session)
    with session.job.data.reader(session.catalogue, session.job.seed) as reader:
        trainer = SplitTrainer(session, stepper, parameters, optimizer, reader)
        trainer.run()
        return trainer.outcome()


class SplitTrainer(Trainer):
    """The run of one rank; arguments as of `train_split`."""

    by_window = False
    reads_alike = True

    stepper: SplitStepper

    def __init__(
        self,
        session: Session,
        stepper: SplitStepper,
        parameters: list[str],
        optimizer: list[str],
        reader: Any,
    ):
        self.made, self.described = stepper, (parameters, optimizer)
        super().__init__(session, stepper.module, stepper.rates, reader, stepper.device)

    @property
    def place(self) -> tuple[int, int]:
        return self.made.share, self.made.num_replicas

    def _make_stepper(self) -> SplitStepper:
        return self.made

    def _make_measure(self) -> None:
        """All ranks measure together."""

    def _make_checkpoints(self) -> StepCheckpoints:
        still = self.module if self.stepper.holds_still else None
        return StepCheckpoints(
            self.session, self.described, dict, self.state, self.stepper.checkpoint_grid, still
        )

    @property
    def _part(self) -> int:  # type: ignore[override]
        """Of a checkpoint."""
        return self.stepper.checkpoint_grid.place(self.rank)[1]

    def _begin(self) -> None:
        """All ranks measure together, so all judge what they have measured, and the first keeps the files."""
        super()._begin()
        validations, runtime = self.validations, self.session.runtime
        validations.writes = self.rank == 0
        validations.adopt(runtime.broadcast(validations.record if self.rank == 0 else None))
        self.stepper.warm_from = self.stepper.step + self.meter.num_warmup

    @property
    def _may_compare(self) -> bool:
        return self.stepper.checkpoint_grid.num_replicas > 1 or self.session.runtime.payloads is not None

    def _alike(self) -> list[tuple[str, torch.Tensor]]:
        """What this rank holds, and those of the other replicas that hold the same part."""
        return [(name, local(one)) for name, one in held_alike(self.module)]

    def _changed(self) -> tuple[str, ...]:
        return ()

    def _state_alike(self) -> Named:
        return [(name, local(one)) for name, one in super()._state_alike()]

    # ---- what this rank goes on from: its part of the model and of the optimizer, and where the run is

    def _held_state(self) -> dict[str, Any]:
        ema = self.stepper.updates.ema
        return take_shards(self.module, self.rates) | ({"ema": ema.state()} if ema is not None else {})

    def _restored(self) -> Any:
        return self.checkpoints.restored_part(self.session, self._part)

    def _restore_held(self, state: dict[str, Any]) -> None:
        restore_shards(self.module, self.rates, state)

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned, here or on a rank that held the same part; or from what it returned
        when a position in the data was a cursor."""
        counts, resume = state["counts"], self.session.resume
        if "cursor" in counts:
            assert resume is not None
            at = counts["epoch"], counts["cursor"], resume.about["batch_size"]
            state = state | {"rounds": self.course.partition.state_at(*at)}
        super().restore(state)

    # ---- validation

    def _measured(self, samples: int | None) -> dict[str, float]:
        """Figures of the model, on every rank; collective."""
        job, runtime, stepper = self.session.job, self.session.runtime, self.stepper
        if self.session.validation is None:
            return {}
        part = stepper.observe()
        if (averaged := stepper.averaged()) is not None:
            with self.checkpoints.guard.changing(), averaged():
                part += stepper.observe(EMA_PREFIX)
        rows = gather_parts(runtime, part)

        def summed_up() -> dict[str, float]:
            metrics = conclude(stepper.metrics, rows) if self.rank == 0 else {}
            check_targets(job.target if self.rank == 0 else {}, metrics)
            return metrics

        metrics = dict(runtime.broadcast(attempt(runtime, summed_up)))
        if samples is not None:
            attempt(runtime, lambda: self.validations.check(metrics))
            self.validations.take_metrics(metrics, samples, self._save_chosen)
        return metrics

    def _save_chosen(self, path: Path, metadata: dict[str, str]) -> None:
        """Write the model that the best metric was measured of; collective."""
        best_by, ema = self.session.job.best_by, self.stepper.updates.ema
        of_average = ema and best_by is not None and best_by.metric.startswith(EMA_PREFIX)
        with ema.swapped() if ema and of_average else contextlib.nullcontext():
            self._save(path, metadata)

    # ---- the outcome

    def _save(self, path: Path, metadata: dict[str, str]) -> None:
        """Write the whole model, of which rank 0 holds one tensor at a time; collective."""
        described = self.stepper.described()
        left = order_of(described)

        def gather(name: str) -> torch.Tensor:
            left.remove(name)
            return self.stepper.gather(name)

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

    @property
    def _writes(self) -> bool:
        return self.stepper.checkpoint_grid.place(self.rank)[0] == 0

    def _divergence(self) -> str:
        why = divergence((name, local(one)) for name, one in self.module.named_parameters())
        return f"rank {self.rank}: {why}" if why else ""

    def _detail(self) -> dict[str, Any]:
        stepper = self.stepper
        place = {"rank": self.rank, "role": "worker", "replica": stepper.replica, "part": stepper.part}
        return {**place, "steps": stepper.step, **stepper.describe()}

    def _counts(self) -> dict[str, Any]:
        return {"replicas": self.stepper.grid.num_replicas}

    def _conclude(self) -> dict[str, Any]:
        return self.stepper.conclude()
