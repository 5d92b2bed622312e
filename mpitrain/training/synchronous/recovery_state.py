"""What a rank of a synchronous run goes on from when others have died.

Invariants: plain data; it knows neither how a run is recovered nor who trains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from mpitrain.training.measure import Meter
from mpitrain.training.synchronous.injected_delay import InjectedDelay

if TYPE_CHECKING:
    from mpitrain.training.synchronous.going_back import GoingBack


class RecoveryState(NamedTuple):
    """What a rank goes on from.

    Attributes:
        step: steps that it has finished; -1 if it has nothing yet.
        failure: that ended its run, or "".
        state: `Trainer.state()`; of two ranks at the same step the same.
        own_before, own: the hook's state before the step under way, and now.
        delay, meter, going_back: go on counting.
        validating: the samples at which a validation had begun that was not over; -1: none was under way.
    """

    step: int = -1
    failure: str = ""
    state: dict[str, Any] | None = None
    own_before: dict[str, Any] | None = None
    own: dict[str, Any] | None = None
    delay: InjectedDelay | None = None
    meter: Meter | None = None
    going_back: GoingBack | None = None
    validating: int = -1

    def shares(self, num_workers: int) -> tuple[Any, list[Any], int]:
        """As `StepCheckpoints.restored_own`, where each of `num_workers` goes on with its own."""
        return self.own_before, [self.own], num_workers
