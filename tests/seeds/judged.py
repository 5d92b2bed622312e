"""When a run of a course validates, and the validation that ends it."""

from __future__ import annotations

from typing import Any

from mpitrain.strategies.validation_policy import ValidationCadence, ValidationPolicy


class Judged(ValidationCadence):
    """Ends the run with its n-th validation; 0: never."""

    metric = "loss"

    def __init__(self, start: Any, clock: Any):
        seconds = start.validate_s
        policy = ValidationPolicy(0, 0 if seconds else start.validate, seconds)
        super().__init__(policy if any(policy) else ValidationPolicy(epochs=1), clock)
        self.may_end, self.informs = start.over_after > 0, start.informs
        self.num_measured, self.over_after = 0, start.over_after

    @property
    def over(self) -> bool:  # type: ignore[override]
        return 0 < self.over_after <= self.num_measured
