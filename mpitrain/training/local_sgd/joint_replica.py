"""A worker under local SGD whose job has a step function: between two averagings it steps its optimizers by itself.

Invariants: as of `LocalReplica`, of which it differs in what a local step is.
"""

from __future__ import annotations

from mpitrain.strategies.sampling.step_partition import StepTurn
from mpitrain.training.local_sgd.replica import LocalReplica
from mpitrain.training.synchronous.joint_steps import JointSteps


class LocalJointReplica(JointSteps, LocalReplica):
    """One worker; the arguments are those of `LocalReplica`."""

    def local_step(self, turn: StepTurn) -> float:
        """The step function over the turn's lease; returns the loss."""
        self.averager.begin_step()
        return self.take_step(self.fetch(turn.lease), turn.lease.num_samples, turn.num_samples)

    def statistics(self) -> dict[str, float]:
        """What there is to report in a row of progress."""
        return super().statistics() | self.named_losses()


def replica_of(has_step: bool) -> type[LocalReplica]:
    """The class of a job's workers; `has_step`: it has a step function."""
    return LocalJointReplica if has_step else LocalReplica
