"""Periodic averaging: the lockstep run whose ranks meet only every so often.

Invariants: ranks take the same number of steps over the same shares as in allreduce; between two averagings no
byte travels. A gradient that is not finite moves nothing; the others hear of it with the next averaging, and a run
that is to stop then stops everywhere. What is validated and saved is the mean of the workers.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from mpitrain.strategies.local_sgd import LocalSGD
from mpitrain.training.local_sgd.averager import Averager
from mpitrain.training.session import Session
from mpitrain.training.synchronous.checkpoints import copied
from mpitrain.training.synchronous.launch import run_lockstep
from mpitrain.training.synchronous.recovery import Kept
from mpitrain.training.synchronous.trainer import Trainer


def run_localsgd(session: Session) -> dict[str, Any]:
    """Train with periodic averaging; returns what this rank knows of the run."""
    return run_lockstep(session, AveragingTrainer)


class AveragingTrainer(Trainer):
    """Local steps and averagings; allreduce before `start`. It walks the course of `PeerPartition`, as virtual time
    does."""

    by_window = False

    def __init__(self, session: Session, *arguments: Any):
        strategy = session.strategy
        assert isinstance(strategy, LocalSGD)
        self.strategy = strategy
        self._skipped = self.local_nonfinite = 0
        self._refused = ""
        super().__init__(session, *arguments)

    def _make_parallel(self) -> Any:
        self.averager = Averager(self.module, self.optimizer, self.strategy)
        return self._make_ddp() if self.strategy.start else self.module

    def _begin_step(self) -> None:
        if self.strategy.start:
            self.parallel.require_backward_grad_sync = self.averager.averages_gradients
        self.averager.begin_step()

    @property
    def averages_gradients(self) -> bool:
        return self.averager.averages_gradients

    def _update(self, value: float, count: int) -> None:
        if self.averager.averages_gradients:
            super()._update(value, count)
        else:
            if self._is_finite():
                self._step_optimizer()
            else:
                self._skip(value)
            self.samples += count
        if self.averager.end_step(count):
            self._average()

    def _skip(self, value: float) -> None:
        self._skipped += 1
        if self.session.job.on_nonfinite == "stop":
            whose = f"rank {self.rank} (worker, step {self.step})"
            what = f"loss is {value:g}" if value - value != 0.0 else "the gradient is not finite"
            self._refused = self._refused or f"{whose}: {what}"

    def _average(self) -> None:
        """Everybody hears what went wrong since the last time, and takes the mean."""
        rows = self.averager.tell(self._skipped, int(bool(self._refused)))
        self.nonfinite += int(rows[:, 0].sum())
        self.local_nonfinite, self._skipped = self.local_nonfinite + self._skipped, 0
        if rows[:, 1].any():
            self.failure = self._refused or f"step {self.step}: another worker's gradient is not finite"
        self.averager.average()

    def _finish(self) -> None:
        if self.averager.is_apart:
            self._average()
            self._remember()

    @torch.no_grad()
    def _validate(self, epoch: int) -> None:
        """Rank 0 measures the mean of the workers; the workers' own parameters stay as they are."""
        if not self.averager.is_apart or self.session.validation is None:
            super()._validate(epoch)
            return
        began_s = time.monotonic()
        means = self.averager.mean_parameters()
        self.meter.pause(time.monotonic() - began_s)
        if self.measure is not None:
            own = [parameter.detach().clone() for parameter in self.averager.parameters]
            torch._foreach_copy_(self.averager.parameters, means)
            super()._validate(epoch)
            torch._foreach_copy_(self.averager.parameters, own)

    def _remember(self) -> None:
        if (
            self.session.runtime.survives_shrink
        ):  # local steps change it, and who is left goes back to where all were equal
            self._common = copied(self.state())

    def keep(self) -> Kept:
        """Everything as after the last averaging: the local steps since then are done again, by those that are left."""
        meter = self.meter if self.rank == 0 else None
        step = self._common["counts"]["step"]
        return Kept(step, self.failure, self._common, nap=self.nap, meter=meter)

    def _may_be_cut(self) -> bool:
        return not self.averager.is_apart

    def state(self) -> dict[str, Any]:
        """As of every lockstep run, with x0, velocities and what rank 0 has rounded off."""
        return super().state() | {"averager": self.averager.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned. Momenta that were not averaged, and what other ranks had rounded off,
        were theirs: all go on with rank 0's momenta, and the others with nothing kept.
        """
        super().restore(state)
        saved = dict(state["averager"])
        if self.rank != 0:
            saved["means"] = {"parts": {}, "own": {}}
        self.averager.restore(saved)

    def _told(self) -> dict[str, float]:
        return self.averager.statistics()

    def _counts(self) -> dict[str, Any]:
        counts = self.averager.statistics()
        return counts | {"accepted": self.step * self.num_workers - self.nonfinite}

    def outcome(self) -> dict[str, Any]:
        """As of every lockstep run, with this rank's drift."""
        outcome = super().outcome()
        outcome["detail"] |= {"drift": self.averager.drift, "nonfinite": self.local_nonfinite}
        return outcome
