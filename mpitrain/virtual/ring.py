"""All-reduces in virtual time: messages round a ring.

Invariants: every rank sends 2 (N - 1) messages of 1/N of the bytes to its neighbour, one after another; no algorithm
sends fewer bytes. Who has come round has heard of everybody, so all ranks have brought what they reduce: the first to
come round has it reduced for all of them, in the order of their ranks. Roles that all-reduce compute without
interruption; other messages that come in mid-ring wait until it is over, and chunks of a neighbour that is ahead until
it begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from mpitrain.effects import AllReduce, Begin, Effect, Recv, Reduction, Role, Send, replaced
from mpitrain.messages import Update

# What all ranks bring to one collective, in the order of ranks; answers what each of them is sent.
Reduce = Callable[[list[Any]], list[Any]]


class Chunk(NamedTuple):
    """Bytes on their way round the ring."""

    num_bytes: int

    def statistics(self) -> dict[str, float]:
        """Nothing to report."""
        return {}

    def release(self) -> None:
        """Nothing is held."""


class Ring:
    """The all-reduces of all ranks of a world.

    Args:
        ranks: all of them; reduce: carries out one collective.
    """

    def __init__(self, ranks: Collection[int], reduce: Reduce):
        self.ranks, self.reduce = sorted(ranks), reduce
        self._num_begun = dict.fromkeys(self.ranks, 0)
        self._num_rounds = dict.fromkeys(self.ranks, 0)
        self._waiting: dict[int, deque[Update]] = {rank: deque() for rank in self.ranks}
        # messages of others that came in mid-ring
        self._others: dict[int, deque[tuple[int, Any]]] = {rank: deque() for rank in self.ranks}
        self._brought: dict[int, dict[int, Reduction]] = {}
        self._results: dict[int, dict[int, Any]] = {}

    def follow(self, rank: int, role: Role) -> Role:
        """The role, with messages round the ring in place of its all-reduces."""
        return replaced(role, lambda effect: self._answer(rank, effect))

    def _answer(self, rank: int, effect: Effect) -> Role:
        if isinstance(effect, Recv):
            return (yield from self._receive(rank, effect))
        if isinstance(effect, Begin):
            return None
        if not isinstance(effect, AllReduce):
            return (yield effect)
        number = self._bring(rank, effect.reduction)
        chunk = Chunk(-(-int(effect.reduction.num_bytes()) // len(self.ranks)))
        for _ in range(2 * (len(self.ranks) - 1)):
            round_number = self._num_rounds[rank]
            yield Send(self._neighbour(rank), Update(round_number, chunk))
            yield from self._expect(rank, round_number)
            self._num_rounds[rank] += 1
        return self._result(rank, number)

    def _expect(self, rank: int, round_number: int) -> Role:
        """The neighbour's message of this round; the neighbour may be a round ahead."""
        waiting = self._waiting[rank]
        while not (waiting and waiting[0].step == round_number):
            kind = f"round {round_number} of an allreduce"
            source, message = yield Recv(kind=kind, sources=(self._neighbour(rank, -1),))
            if _is_chunk(message):
                waiting.append(message)
            else:
                self._others[rank].append((source, message))
        waiting.popleft()

    def _receive(self, rank: int, effect: Recv) -> Role:
        """The role's own next message."""
        if self._others[rank]:
            return self._others[rank].popleft()
        while (arrived := (yield effect)) is not None and _is_chunk(arrived[1]):
            self._waiting[rank].append(arrived[1])
        return arrived

    def _neighbour(self, rank: int, distance: int = 1) -> int:
        return self.ranks[(self.ranks.index(rank) + distance) % len(self.ranks)]

    def _bring(self, rank: int, reduction: Reduction) -> int:
        """This rank has come to its next all-reduce; returns the number of that."""
        number = self._num_begun[rank]
        self._num_begun[rank] += 1
        self._brought.setdefault(number, {})[rank] = reduction
        return number

    def _result(self, rank: int, number: int) -> Any:
        if number not in self._results:
            brought = self._brought.pop(number)
            assert len(brought) == len(self.ranks), "an all-reduce before everybody has come to it"
            self._results[number] = self._carry_out([brought[one] for one in self.ranks])
        results = self._results[number]
        result = results.pop(rank)
        if not results:
            del self._results[number]
        return result

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
            answers = self.reduce(brought)


def _is_chunk(message: Any) -> bool:
    return isinstance(message, Update) and isinstance(message.payload, Chunk)
