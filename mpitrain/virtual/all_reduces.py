"""All-reduces of roles in virtual time.

Invariants: one ends for everybody so long after the last rank has come to it as the formulas of `collectives.py` say of
the algorithm that would carry it; all ranks hear of all others, so none can be done before. A rank that waits in one
drives its messages, and what comes for it meanwhile it takes in afterwards.

The formulas are those of idle links. That is what they are: a rank comes to an all-reduce when it has nothing else
under way, and it sends nothing before the end. What ranks outside send at the same time (a server, to another one)
neither delays it nor is delayed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from mpitrain.effects import Reduction

# What all ranks bring to one collective, in the order of ranks; answers what each of them is sent.
Reduce = Callable[[list[Any]], list[Any]]


class Ended(NamedTuple):
    """What has come of one of so many bytes, by rank, and seconds that it takes from the arrival of the last rank."""

    num_bytes: int
    results: dict[int, Any]
    took_s: float


def _at_once(num_bytes: int) -> float:
    """It takes no time."""
    return 0.0


class AllReduces:
    """The all-reduces of some ranks of a world.

    Args:
        ranks: all of them; reduce: carries out one collective.
        seconds: what an all-reduce of so many bytes takes.
    """

    def __init__(self, ranks: Collection[int], reduce: Reduce, seconds: Callable[[int], float] = _at_once):
        self.ranks, self._reduce, self._seconds = sorted(ranks), reduce, seconds
        self._brought: dict[int, Reduction] = {}

    def bring(self, rank: int, reduction: Reduction) -> Ended | None:
        """This rank has come to its next all-reduce; None: others have not yet."""
        self._brought[rank] = reduction
        if len(self._brought) < len(self.ranks):
            return None
        reductions, self._brought = [self._brought[one] for one in self.ranks], {}
        num_bytes = max(int(one.num_bytes()) for one in reductions)
        return Ended(num_bytes, self._carry_out(reductions), self._seconds(num_bytes))

    def missing(self, rank: int) -> list[int]:
        """Whom this rank waits for in an all-reduce."""
        return [one for one in self.ranks if one not in self._brought] if rank in self._brought else []

    def forget(self, rank: int) -> None:
        """The rank is no more: one that it has come to does not end unless all others had come."""
        self._brought.pop(rank, None)

    def _carry_out(self, reductions: list[Reduction]) -> dict[int, Any]:
        """All rounds of all ranks: everybody asks the same questions in the same order."""
        rounds = [reduction.rounds() for reduction in reductions]
        results: dict[int, Any] = {}
        answers: list[Any] = [None] * len(rounds)
        while True:
            brought = []
            for rank, one, answer in zip(self.ranks, rounds, answers, strict=True):
                try:
                    brought.append(one.send(answer))
                except StopIteration as end:
                    results[rank] = end.value
            if not brought:
                return results
            assert len(brought) == len(rounds), "ranks bring different things to an all-reduce"
            answers = self._reduce(brought)
