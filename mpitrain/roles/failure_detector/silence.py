"""Who has been heard of, and who is silent.

Invariants: arithmetic on times that it is handed. Who has not been answered owes nothing, so silence begins with
the last word of either side. A worker counts as silent when it has been so for longer than `PATIENCE` times its longest
gap so far, and never sooner than `LEAST_SILENCE_S` where nothing is lost by it, or `MID_SILENCE_S` in the middle of a
run (or a floor of the user's own in place of both); before its second message the longest gap of all workers stands in,
and `FIRST_SILENCE_S`. One that has said that it validates is judged by its validations, and the first time given
`AWAY_SILENCE_S` where everybody waits for it.
"""

from __future__ import annotations

LEAST_SILENCE_S = 3.0
FIRST_SILENCE_S = MID_SILENCE_S = 60.0
AWAY_SILENCE_S = 900.0
PATIENCE = 8.0
SIGNS_S = 1.0  # how often a worker says that it waits, where one server may hold it that another has let go


class SilenceTracker:
    """What a server knows of its workers besides their pushes; `floor_s` replaces both of the floors above."""

    def __init__(self, floor_s: float | None = None):
        self.least_silence_s = LEAST_SILENCE_S if floor_s is None else floor_s
        self.mid_silence_s = MID_SILENCE_S if floor_s is None else floor_s
        self._heard_s: dict[int, float] = {}
        self._answered_s: dict[int, float] = {}
        self._longest_s: dict[int, float] = {}
        self._away: dict[int, bool] = {}  # they validate, or (True) measure one part of a validation
        self._waiting: set[int] = set()  # have said last that they wait for an answer
        self._longest_away_s: dict[tuple[int, bool], float] = {}
        self._began_s: float | None = None

    def heard(self, worker: int, now_s: float) -> None:
        """A message has come in."""
        self._began_s = now_s if self._began_s is None else self._began_s
        if worker in self._heard_s:
            silence_s = self.silence_s(worker, now_s)
            if worker in self._away:
                key = worker, self._away[worker]
                self._longest_away_s[key] = max(self._longest_away_s.get(key, 0.0), silence_s)
            else:
                self._longest_s[worker] = max(self._longest_s.get(worker, 0.0), silence_s)
        self._heard_s[worker] = now_s
        self._away.pop(worker, None)
        self._waiting.discard(worker)

    def goes_away(self, worker: int, for_part: bool = False) -> None:
        """Its next message comes after a validation, or after a part of one: each is judged by its own kind."""
        self._away[worker] = for_part

    def answered(self, worker: int, now_s: float) -> None:
        """It has been answered, perhaps after it was held for long, or has said that it waits."""
        self._answered_s[worker] = now_s

    def reports_waiting(self, worker: int, now_s: float) -> None:
        """A sign of life: it waits for an answer, perhaps another server's."""
        self._answered_s[worker] = now_s
        self._waiting.add(worker)

    def waits(self, worker: int, now_s: float) -> bool:
        """Whether it has just said so."""
        return worker in self._waiting and self.silence_s(worker, now_s) <= 5 * SIGNS_S

    def silence_s(self, worker: int, now_s: float) -> float:
        """How long ago the last word of either side was."""
        began_s = now_s if self._began_s is None else self._began_s
        return now_s - max(self._heard_s.get(worker, began_s), self._answered_s.get(worker, began_s))

    def is_silent(self, worker: int, now_s: float, mid: bool) -> bool:
        """Whether it has been silent for longer than can be its usual; `mid`: in the middle of a run, where others wait
        for its gradient or go on without it."""
        floor_s = max(self.least_silence_s, self.mid_silence_s if mid else 0.0)
        return self.silence_s(worker, now_s) > max(floor_s, *self._usual_s(worker))

    def is_overdue(self, worker: int, now_s: float, away_s: float) -> bool:
        """`is_silent` where nobody else reports a death; a first validation is given `away_s`."""
        if worker in self._away and self._away_s(worker) is None:
            return self.silence_s(worker, now_s) > max(away_s, self.mid_silence_s)
        return self.is_silent(worker, now_s, mid=True)

    def _away_s(self, worker: int) -> float | None:
        """The longest absence of the kind that it has announced; None before the first."""
        return self._longest_away_s.get((worker, self._away[worker]))

    def _usual_s(self, worker: int) -> tuple[float, ...]:
        if worker in self._away:
            away_s = self._away_s(worker)
            first_s = AWAY_SILENCE_S if away_s is None else 0.0
            return first_s, PATIENCE * max(self._longest_s.get(worker, 0.0), away_s or 0.0)
        if worker in self._longest_s:
            return (PATIENCE * self._longest_s[worker],)
        return FIRST_SILENCE_S, PATIENCE * max(self._longest_s.values(), default=0.0)
