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
from mpitrain.training.local_sgd.replica import LocalReplica
from mpitrain.training.session import Session
from mpitrain.training.synchronous.checkpoints import copied
from mpitrain.training.synchronous.launch import run_lockstep
from mpitrain.training.synchronous.recovery_state import Kept
from mpitrain.training.synchronous.trainer import Trainer


def run_localsgd(session: Session) -> dict[str, Any]:
    """Train with periodic averaging; returns what this rank knows of the run."""
    return run_lockstep(session, AveragingTrainer)


class AveragingTrainer(Trainer):
    """Local steps and averagings; allreduce before `start`. It walks the course of `PeerPartition`, as virtual time
    does."""

    by_window = False

    stepper: LocalReplica

    def _make_stepper(self) -> LocalReplica:
        session, strategy = self.session, self.session.strategy
        assert isinstance(strategy, LocalSGD)
        self.averager = Averager(self.module, self.optimizer, strategy)
        num_samples = session.catalogue.num_samples
        where = session.runtime.where
        replica = LocalReplica(self.averager, session.job, self.num_workers, num_samples, self.rank, where)
        replica.train(self.module, self.rates, self._make_parallel() if strategy.start else None)
        return replica

    def _after_update(self, count: int) -> None:
        if self.averager.end_step(count):
            self._average()

    def _average(self) -> None:
        self.averager.answer(self.stepper.average())

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
        self.cuts.keeper.wait()
        meter = self.meter if self.rank == 0 else None
        step = self._common["counts"]["step"]
        return Kept(step, self.stepper.failure, self._common, nap=self.nap, meter=meter)

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
        return counts | {"accepted": self.stepper.step * self.num_workers - self.stepper.nonfinite}

    def outcome(self) -> dict[str, Any]:
        """As of every lockstep run, with this rank's drift."""
        outcome = super().outcome()
        outcome["detail"] |= {"drift": self.averager.drift, "nonfinite": self.stepper.local_nonfinite}
        return outcome
