"""Local SGD over MPI: the role of a worker, with the data, checkpoints and recovery of synchronous runs.

Invariants: ranks take the same number of steps over the same shares as in allreduce, and checkpoints are written only
where all hold the same. What is validated and saved is the mean of the workers.
"""

from __future__ import annotations

from typing import Any

import torch

from mpitrain.strategies.local_sgd import LocalSGD
from mpitrain.training.local_sgd.averager import Ask, Averager
from mpitrain.training.local_sgd.joint_replica import replica_of
from mpitrain.training.local_sgd.replica import LocalReplica
from mpitrain.training.outcome import RunOutcome
from mpitrain.training.replica_guard import Named
from mpitrain.training.session import Session, attempt
from mpitrain.training.synchronous.checkpoints import StepCheckpoints
from mpitrain.training.synchronous.copying_trainer import CopyingTrainer
from mpitrain.training.synchronous.launch import run_synchronous
from mpitrain.training.synchronous.recovery_state import RecoveryState
from mpitrain.training.validations.validation_parts import gather_parts


def run_local_sgd(session: Session) -> RunOutcome:
    """Train under local SGD; returns what this rank knows of the run."""
    return run_synchronous(session, LocalSGDTrainer)


class LocalSGDTrainer(CopyingTrainer):
    """Runs the role of one worker, whose course it is: that of `PeerPartition`, as in virtual time."""

    by_window = False

    stepper: LocalReplica

    def _make_stepper(self) -> LocalReplica:
        session, strategy = self.session, self.session.strategy
        assert isinstance(strategy, LocalSGD)
        self.averager = Averager(self.module, self.optimizer, strategy, collectives=self.collectives)
        replica = replica_of(session.job.step is not None)(
            self.averager, self._parts, session.job, self.recipe, self.rank, session.runtime.where, self.set_measure,
        )  # fmt: skip
        # what averages gradients in the backward pass, as long as all step together; threads do so after it
        in_backward = strategy.start and session.runtime.num_threads is None
        replica.train(self.module, self.rates, self._make_parallel() if in_backward else None)
        replica.on_settled = self.settle_checkpoint
        return replica

    @property
    def replica(self) -> LocalReplica:
        return self.stepper

    def run(self) -> None:
        super().run()
        self._remember()
        self.ended_out_of_turn = self.stepper.ended_apart
        if self.stepper.ended:
            self.checkpoints.end_early(True, self.stepper.samples)

    def _reduce(self, ask: Ask) -> Any:
        if ask.part is not None:
            return gather_parts(self.session.runtime, ask.part)
        return self.averager.reduce(ask)

    def _alike(self) -> list[tuple[str, torch.Tensor]]:
        return self.averager.held_alike()

    def _state_alike(self) -> Named:
        return super()._state_alike() if self.session.strategy.average_optimizer else []

    def _may_write_checkpoint(self) -> bool:
        return not self.averager.is_apart

    def state(self) -> dict[str, Any]:
        """As of every synchronous run, with x0, velocities and what rank 0 has rounded off."""
        return super().state() | {"averager": self.averager.state()}

    def own_state(self) -> dict[str, Any]:
        """What this worker alone holds when all hold the same parameters: its momenta, buffers, and what it has rounded
        off; that of rank 0 is in `state`."""
        if self.rank == 0:
            return {}
        return {
            "optimizer": self.rates.state(), "module": dict(self.module.named_buffers()),
            "means": self.averager.means.state(),
        }  # fmt: skip

    def _make_checkpoints(self) -> StepCheckpoints:
        return StepCheckpoints(
            self.session, self._described, self.state, self.own_state,
            module=self.module, collectives=self.collectives, own_stands=True,
        )  # fmt: skip

    def _restore_own(self, kept: RecoveryState | None) -> None:
        """Of as many workers each goes on with its own; of fewer the first ones do. Who was not there before begins
        with what the first worker had."""
        if kept is not None:  # which holds its own
            return
        first, mine, number = self.checkpoints.restored_own(self.session)
        if number == 1 < self.num_workers and first is None:
            self.session.report.event(
                "momenta", text="the checkpoint holds the first worker's alone: the others begin with them"
            )
        attempt(self.session.runtime, lambda: self.restore_own(mine[0] if mine else {}))

    def restore_own(self, own: dict[str, Any]) -> None:
        if own:
            self.rates.restore(own["optimizer"])
            self.averager.means.restore(own["means"])
            with torch.no_grad():
                for name, buffer in self.module.named_buffers():
                    buffer.copy_(own["module"][name])

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned, with rank 0's momenta until this rank's own are there."""
        super().restore(state)
        saved = dict(state["averager"])
        if self.rank != 0:
            saved["means"] = {"parts": {}, "own": {}}
        self.averager.restore(saved)

    def _counts(self) -> dict[str, Any]:
        counts = self.averager.statistics()
        return counts | {"accepted": self.stepper.step * self.num_workers - self.stepper.nonfinite}

    def outcome(self) -> RunOutcome:
        """As of every synchronous run, with this rank's drift."""
        outcome = super().outcome()
        outcome.detail |= {"drift": self.averager.drift, "nonfinite": self.stepper.local_nonfinite}
        return outcome
