"""When a job ends before its time and is started again, and how much later it is by then.

Invariants: roles live in *useful* time, in which nothing ends and nothing is done twice. A start goes on from the
newest checkpoint that is whole, and repeats what had come after it at the pace and with the numbers of the first time.
So an end costs the seconds since that checkpoint was taken, and those of starting again, and changes nothing else. That
is what happens under rules that resume bit for bit; under the others it leaves out that gradients under way are lost.
Everything is a pure function of the arguments: the times between two ends are keyed by (seed, number of the end).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from mpitrain.errors import UsageError

MOST_IN_A_ROW = 10_000  # ends of a job that gets no further in between


class Outages:
    """The ends of one job.

    Args:
        restart_s: from an end until the job works again.
        mtbf_s: mean of the exponential times between two ends, whatever the job does meanwhile, starting included;
            infinite: it never ends by chance.
        at_s: times, counted from the beginning, at which it ends besides.
        seed: key of the draws.

    Attributes:
        num_ends: so far; repeated_s: seconds in which work was done again; starting_s: seconds of starting again.
    """

    def __init__(self, restart_s: float, mtbf_s: float = math.inf, at_s: Sequence[float] = (), seed: int = 0):
        self.restart_s, self.mtbf_s, self.seed = restart_s, mtbf_s, seed
        self.num_ends = 0
        self.repeated_s = self.starting_s = 0.0
        self._ordered = sorted(at_s, reverse=True)
        self._whole: list[tuple[float, float]] = [(0.0, 0.0)]  # (when whole, when taken), useful seconds
        self._drawn_s, self._num_drawn = 0.0, 0
        self._reached_s, self._died_s = 0.0, -1.0  # useful seconds
        self._draw()

    def keep(self, taken_s: float, whole_s: float) -> None:
        """A checkpoint of what the job had done at `taken_s` is whole at `whole_s` (useful seconds)."""
        self._whole.append((whole_s, taken_s))

    def elapsed_s(self, useful_s: float) -> float:
        """How long the job has taken when it has done what it does in `useful_s` seconds without an end; every
        checkpoint that was taken before must be known.

        Raises:
            UsageError: it gets no further.
        """
        self._reached_s = max(self._reached_s, useful_s)
        while useful_s + self._lost_s > self._next_s:
            self._end(self._next_s - self._lost_s)
        return useful_s + self._lost_s

    def die(self, useful_s: float) -> None:
        """A rank dies here, without which the job cannot go on; another death at the same moment changes nothing.

        Raises:
            UsageError: the job gets no further.
        """
        if useful_s == self._died_s:
            return
        self._died_s = useful_s
        self.elapsed_s(useful_s)  # what ended it before
        self._end(self._reached_s)

    def _end(self, useful_s: float) -> None:
        """The job ends, is started again, and repeats what it had done since the checkpoint that it goes on from."""
        repeats_s = useful_s - self._newest_s(useful_s)
        now_s, in_a_row = useful_s + self._lost_s, 0
        while True:
            if in_a_row == MOST_IN_A_ROW:
                raise UsageError(self._gets_no_further(repeats_s))
            self.num_ends, in_a_row = self.num_ends + 1, in_a_row + 1
            self._go_past(now_s)
            works_s = now_s + self.restart_s
            until_s = min(works_s + repeats_s, self._next_s)
            self.starting_s += min(until_s, works_s) - now_s
            self.repeated_s += max(0.0, until_s - works_s)
            now_s = until_s
            if until_s < self._next_s:
                return

    def _gets_no_further(self, repeats_s: float) -> str:
        advice = "write checkpoints more often (--checkpoint-every)"
        if self.restart_s > self.mtbf_s:
            advice = "it seldom lives until it works again"
        return (
            f"the job ended {MOST_IN_A_ROW} times in a row before it had repeated the {repeats_s:.4g} s of work since "
            f"its last checkpoint, at {self.mtbf_s:.4g} s between two ends and {self.restart_s:.4g} s to start again: "
            f"{advice}"
        )

    @property
    def _lost_s(self) -> float:
        return self.repeated_s + self.starting_s

    @property
    def _next_s(self) -> float:
        return min(self._drawn_s, self._ordered[-1] if self._ordered else math.inf)

    def _go_past(self, now_s: float) -> None:
        """Draw the next end after this time."""
        while self._ordered and self._ordered[-1] <= now_s:
            self._ordered.pop()
        while self._drawn_s <= now_s < math.inf:
            self._draw()

    def _draw(self) -> None:
        if math.isinf(self.mtbf_s):
            self._drawn_s = math.inf
            return
        drawn = random.Random(f"crash/{self.seed}/{self._num_drawn}").random()
        self._drawn_s -= self.mtbf_s * math.log(1.0 - drawn)
        self._num_drawn += 1

    def _newest_s(self, useful_s: float) -> float:
        """When the newest checkpoint was taken that is whole now; those before it are of no use any more."""
        newest_s = max(taken_s for whole_s, taken_s in self._whole if whole_s <= useful_s)
        self._whole = [one for one in self._whole if one[1] >= newest_s]
        return newest_s
