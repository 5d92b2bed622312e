"""Who has been heard of, and who is lost.

Law of this file: arithmetic on times that it is handed. Who has not been answered owes nothing, so silence begins with
the last word of either side. A worker counts as silent when it has been so for longer than `PATIENCE` times its longest
gap so far, and never sooner than `LEAST_SILENCE_S`, or, where a rule makes the others wait for it in the middle of a
run, `HELD_SILENCE_S`; before its second message the longest gap of all workers stands in, and `FIRST_SILENCE_S`.
"""

from __future__ import annotations

LEAST_SILENCE_S = 3.0
FIRST_SILENCE_S = HELD_SILENCE_S = 60.0
PATIENCE = 8.0


class Attendance:
    """What a server knows of its workers besides their pushes."""

    def __init__(self, workers: tuple[int, ...]):
        self.least_silence_s = LEAST_SILENCE_S
        self.lost: dict[int, str] = {}  # rank: "died" or "silent"
        self.validator = min(workers)
        self._heard_s: dict[int, float] = {}
        self._answered_s: dict[int, float] = {}
        self._longest_s: dict[int, float] = {}
        self._began_s: float | None = None

    def heard(self, worker: int, now_s: float) -> None:
        """A message has come in."""
        self._began_s = now_s if self._began_s is None else self._began_s
        if worker in self._heard_s:
            gap_s = now_s - self._heard_s[worker]
            self._longest_s[worker] = max(self._longest_s.get(worker, 0.0), gap_s)
        self._heard_s[worker] = now_s

    def answered(self, worker: int, now_s: float) -> None:
        """It has been told to go on, perhaps after it was held for long."""
        self._answered_s[worker] = now_s

    def is_silent(self, worker: int, now_s: float, held: bool) -> bool:
        """Whether it has been silent for longer than can be its usual; `held`: others wait for its gradient."""
        if self._began_s is None:
            return False
        last_s = max(self._heard_s.get(worker, self._began_s), self._answered_s.get(worker, self._began_s))
        silence_s = now_s - last_s
        least_s = max(self.least_silence_s, HELD_SILENCE_S if held else 0.0)
        if worker in self._longest_s:
            return silence_s > max(least_s, PATIENCE * self._longest_s[worker])
        longest_s = max(self._longest_s.values(), default=0.0)
        return silence_s > max(least_s, FIRST_SILENCE_S, PATIENCE * longest_s)

    def lose(self, worker: int, present: set[int], how: str) -> None:
        """`worker` will push no more; if it was the validator, the lowest that remains takes over."""
        self.lost[worker] = how
        if worker == self.validator and present:
            self.validator = min(present)
