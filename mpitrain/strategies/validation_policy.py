"""When a run validates, counted in whole epochs, accepted samples or seconds.

Invariants: pure arithmetic. Epochs and samples are known to every rank that takes the same steps, so all of them come
to a validation together without a message; seconds are one rank's, which the others have to learn of.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mpitrain.errors import UsageError
from mpitrain.strategies.figures import Figures


class ValidationPolicy(NamedTuple):
    """One of: every so many `epochs`, accepted `samples` or `seconds`; all 0 is only at the end."""

    epochs: int = 0
    samples: int = 0
    seconds: float = 0.0


EVERY_EPOCH = ValidationPolicy(epochs=1)


def read_validation_policy(when: int | str | None) -> ValidationPolicy:
    """`2`, `"2"` or `"2 epochs"`, `"10000 samples"`, `"60s"`, `"never"` (only at the end); None is every epoch.

    Raises:
        UsageError: anything else.
    """
    if when is None:
        return EVERY_EPOCH
    if isinstance(when, int) and not isinstance(when, bool) and when > 0:
        return ValidationPolicy(epochs=when)
    text = when.strip() if isinstance(when, str) else ""
    if text == "never":
        return ValidationPolicy()
    if (match := re.fullmatch(r"(\d+) ?(epochs?|samples?|)", text)) and int(match[1]):
        number = int(match[1])
        return (
            ValidationPolicy(samples=number)
            if match[2].startswith("sample")
            else ValidationPolicy(epochs=number)
        )
    if (match := re.fullmatch(r"(\d+(?:\.\d+)?) ?s", text)) and float(match[1]):
        return ValidationPolicy(seconds=float(match[1]))
    raise UsageError(
        f'validate_every={when!r}: expected epochs such as 2 or "2 epochs", samples such as "10000 samples", seconds '
        'such as "60s", or "never" for only at the end'
    )


class ValidationCadence:
    """Whether a validation is due, asked as often as there may be one; the first question is where the run begins.

    Args:
        clock: in seconds; the only one that a policy in seconds goes by. By default one that stands still.
    """

    may_end = False  # whether a validation may end the run
    informs = False  # whether a scheduler goes by what is measured
    metric = ""  # by which of it
    over = False  # whether one has
    under_way = -1  # the samples at which a validation has begun that is not done
    # Where ranks validate together by the clock: whether they have agreed to do so now.
    agreed: Callable[[], bool] | None = None
    _again = False

    def __init__(self, policy: ValidationPolicy = EVERY_EPOCH, clock: Callable[[], float] = float):
        self.policy, self.clock = policy, clock
        self._epochs: int | None = None
        self._samples, self._since_s = 0, 0.0

    @property
    def counts_seconds(self) -> bool:
        """Whether time matters."""
        return self.policy.seconds > 0

    def time_is_up(self) -> bool:
        """Whether so many seconds have passed since the last validation."""
        return self.counts_seconds and self.clock() - self._since_s >= self.policy.seconds

    def begin(self, epochs: int, samples: int) -> None:
        """The run is here; one that has said where its last validation was has begun there."""
        if self._epochs is None:
            self._epochs, self._samples = epochs, samples
        self._since_s = self.clock()

    def go_on_from(self, rows: Sequence[Sequence[Any]] | None) -> None:
        """In the run so far these `Figures` were heard, where a scheduler goes by them: one that is missing, since a
        checkpoint was written before its validation was made, is measured now."""
        if rows is not None and self.informs:
            self._epochs, self._samples = (int(rows[-1][0]), int(rows[-1][1])) if rows else (0, 0)

    @property
    def place(self) -> tuple[int | None, int]:
        """Epochs and samples at the last question."""
        return self._epochs, self._samples

    def go_back_to(self, place: tuple[int | None, int]) -> None:
        """The run goes on from where this was the `place`; a validation that was under way comes again."""
        (self._epochs, self._samples), self.under_way = place, -1

    def epoch_of(self, epoch: int) -> int:
        """The epoch under way, where the next batch is of this one: that of before where a validation is missing."""
        return epoch if self._epochs is None else min(epoch, self._epochs)

    def told(self, metrics: Mapping[str, float]) -> str:
        """What there is to tell the others of the validation that was due, as of `Figures`; of no worth where nothing
        was measured here."""
        figures = Figures()
        figures.take_rows([(self._epochs or 0, self._samples, metrics.get(self.metric, math.nan))])
        return figures.told()

    def repeat(self) -> None:
        """The last validation was broken off: one is due now."""
        self._again = True

    def done(self) -> None:
        """The validation that was due is over."""
        self.under_way = -1

    def result(self) -> dict[str, Any]:
        """What `result.json` says of the validations, JSON-able."""
        return {}

    def is_due(self, epochs: int, samples: int) -> bool:
        """Whether to validate now, after so many whole epochs and accepted samples."""
        if self._epochs is None:
            self.begin(epochs, samples)
            return False
        policy, epochs = self.policy, max(epochs, self._epochs)  # what a lost worker had comes late
        due = _crossed(policy.epochs, self._epochs, epochs) or _crossed(
            policy.samples, self._samples, samples
        )
        self._epochs, self._samples = epochs, samples
        if self.counts_seconds:
            due = self.time_is_up() if self.agreed is None else self.agreed()
            self._since_s = self.clock() if due else self._since_s
        due, self._again = due or self._again, False
        self.under_way = samples if due else self.under_way
        return due


def _crossed(every: int, before: int, now: int) -> bool:
    """Whether a multiple of `every` lies in (before, now]."""
    return every > 0 and now // every > before // every
