"""A trainer whose steps change what all ranks hold before they are whole.

Invariants: where ranks may die, each keeps a copy of what all held when they last held the same, and goes back to that.
"""

from __future__ import annotations

from mpitrain.training.synchronous.checkpoints import copied
from mpitrain.training.synchronous.recovery_state import RecoveryState
from mpitrain.training.synchronous.trainer import Trainer


class CopyingTrainer(Trainer):
    """A `Trainer` whose steps change what all hold before they are whole: where ranks may die, each keeps a copy of
    what all held when they last held the same, and goes back to that."""

    def _remember(self) -> None:
        if self.session.runtime.survives_shrink:
            self._common = copied(self.state())

    def keep_state(self) -> RecoveryState:
        self.checkpoints.writer.wait()
        meter, step = self.meter if self.rank == 0 else None, self._common["counts"]["step"]
        # the copy is of before the end of an epoch, at which a validation comes by itself
        validating = -1 if self.validations.policy.epochs else self.validations.under_way
        return RecoveryState(
            step, self.stepper.failure, self._common, delay=self.delay, meter=meter, going_back=self.going_back,
            validating=validating,
        )  # fmt: skip
