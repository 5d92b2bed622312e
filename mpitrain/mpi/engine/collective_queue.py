"""Collectives waiting for their turn: one line a group, and what its ranks tell each other on arrival.

The law of this file: **no rank touches another's memory before all have asked for the same thing.** A rank that
arrives at a collective adds three words to a small nonblocking Allreduce, polled like everything else:

    mark       a hash of what it calls (operation, dtype, number of elements, root ...): all are equal iff sum = n x own
    balance    for exchanges of unequal parts, the hashes of what it sends minus those of what it expects: sum = 0
    busy       1 if it waits at another group's line too

Two's-complement sums are exact, so every rank draws the same conclusion: a difference is an exception on all of them
before anything was sent (Open MPI 5.0.11 crashes on a long message that does not fit its receive).

Within a line, collectives run one after another in order of submission, which MPI demands to be the same on all ranks.
Different lines are independent. A collective may block inside MPI (`calm`) only where nobody was busy elsewhere: were
ranks ever to wait for each other in a circle of blocking calls, each of them would stand in two lines, so its second
arrival said busy, and one call of the circle would not have been allowed to block.
"""

import functools
import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any

import numpy as np

from mpitrain.errors import MismatchError
from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.operation import Op

LEFT = "no collective: it has left the group"
Task = Generator[Iterable[Op], None, Any]  # yields what it waits for, is resumed when all of that is done


@functools.lru_cache(maxsize=4096)
def word(text: str) -> int:
    """64 bits that stand for `text`, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Turn:
    """One collective in a line. `function(calm)` runs when all ranks have arrived; it may return a Task."""

    __slots__ = ("arrival", "function", "heard", "mark", "op", "said", "what")

    def __init__(self, op: Op, function: Callable[[bool], Any], what: str, balance: int, busy: bool):
        self.op, self.function, self.what = op, function, what
        self.mark = word(what)
        self.said = np.array([self.mark, balance % 2**64, busy], dtype=np.uint64)
        self.heard = np.empty_like(self.said)
        self.arrival: Op | None = None

    @property
    def arrived(self) -> bool:
        """True when every rank has come here."""
        return self.arrival is None or self.arrival.done

    def check(self, gate: "MPI.Comm") -> bool:
        """True if this collective may block; raises MismatchError, on every rank, if the ranks do not agree."""
        if self.arrival is None:
            return True
        if self.arrival.error is not None:
            raise self.arrival.error
        if gate.Iprobe(MPI.ANY_SOURCE, last_tag()):
            raise GaveUpError(
                f"{self.what}: other ranks have waited for this one until their timeout and given up"
            )
        marks, balance, busy = (int(number) for number in self.heard)
        if marks != self.mark * gate.size % 2**64 or balance:
            raise MismatchError(_tell_apart(gate, self.what))
        return not busy


class GaveUpError(TimeoutError):
    """Other ranks of the group have timed out in a collective that this rank came to too late."""


@functools.cache
def last_tag() -> int:
    """The largest tag of this MPI, kept for notes that a rank has given up."""
    largest = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    return largest if isinstance(largest, int) else 32767  # what every MPI allows


class Line:
    """The collectives of one group that have been submitted and are not done."""

    def __init__(self, gate: "MPI.Comm"):
        self.gate = gate
        self.turns: deque[Turn] = deque()
        self.running: Turn | None = None
        self.broken: BaseException | None = None  # after a timeout the ranks may disagree on who is where

    def __len__(self) -> int:
        return len(self.turns) + (self.running is not None)

    def give_up(self) -> list["MPI.Request"]:
        """Tell the others that this rank comes to no further collective: one that came late would wait for ever."""
        return [
            self.gate.Isend(b"", rank, last_tag()) for rank in range(self.gate.size) if rank != self.gate.rank
        ]


def _tell_apart(gate: "MPI.Comm", what: str) -> str:
    """Collective, after a mismatch that every rank has seen: who called what."""
    own = np.zeros(200, dtype=np.uint8)
    text = np.frombuffer(what.encode()[: own.size], dtype=np.uint8)
    own[: text.size] = text
    every = np.empty((gate.size, own.size), dtype=np.uint8)
    gate.Allgather([own, MPI.UINT8_T], [every, MPI.UINT8_T])
    said: dict[str, list[int]] = {}
    for rank, row in enumerate(every):
        said.setdefault(row.tobytes().rstrip(b"\0").decode(errors="replace"), []).append(rank)
    if len(said) == 1:
        return f"the ranks of this group call {what}, but what they send is not what the others expect to receive"
    parts = [f"rank{'s' * (len(ranks) > 1)} {_some(ranks)}: {text}" for text, ranks in said.items()]
    return f"the ranks of this group call different collectives: {'; '.join(parts)}"


def _some(ranks: list[int], limit: int = 8) -> str:
    return ", ".join(map(str, ranks[:limit])) + (
        f" and {len(ranks) - limit} more" if len(ranks) > limit else ""
    )


def failing(task: Task, error: BaseException) -> Task:
    """A task that continues `task` by raising `error` in it."""
    waited = task.throw(error)
    while True:
        yield waited
        waited = task.send(None)
