"""What the ranks of one process share: an inbox each, places to meet, and what has gone wrong first.

Invariants: a rank that waits, in whatever place, is woken by the failure of another one, so nobody waits in vain.
What a meeting gives is computed once, by the last one to come, from what all have brought in the order of their
ranks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpitrain.errors import MpitrainError


class CalledOffError(MpitrainError):
    """Another rank has failed, or the run was interrupted: this one ends, too."""


class Failure(NamedTuple):
    """The first thing that went wrong; `where` names the rank, its role and its step."""

    where: str
    error: BaseException


Box = queue.SimpleQueue[Any]  # of (source, message), or None for a failure


class Hub:
    """Shared by `size` ranks.

    Attributes:
        inboxes: of every rank; failed: is set when something has gone wrong.
        last_words: what ranks have to report at their end, by rank, as JSON; verdict: what comes of it.
    """

    def __init__(self, size: int):
        self.size = size
        self.inboxes: list[Box] = [queue.SimpleQueue() for _ in range(size)]
        self.failed = threading.Event()
        self.failure: Failure | None = None
        self.changed = threading.Condition()
        self.last_words: dict[int, str] = {}
        self.verdict: str | None = None
        self._meetings: dict[tuple[tuple[int, ...], int], Meeting] = {}

    def fail(self, where: str, error: BaseException) -> None:
        """Something has gone wrong: the first one counts, and all who wait are woken."""
        with self.changed:
            if self.failure is None:
                self.failure = Failure(where, error)
            self.failed.set()
            self.changed.notify_all()
        for box in self.inboxes:
            box.put(None)

    def check(self) -> None:
        """Raise CalledOffError if something has gone wrong."""
        if self.failed.is_set():
            assert self.failure is not None
            raise CalledOffError(f"called off: {self.failure.where} has failed")

    def meeting(self, ranks: Sequence[int], number: int) -> Meeting:
        """The place where `ranks` meet; `number` tells several of the same ranks apart."""
        with self.changed:
            return self._meetings.setdefault((tuple(ranks), number), Meeting(self, ranks))


class Meeting:
    """Where some ranks meet, again and again."""

    def __init__(self, hub: Hub, ranks: Sequence[int]):
        self.hub, self.ranks = hub, tuple(ranks)
        self._brought: dict[int, Any] = {}
        self._round, self._result = 0, None

    def meet(self, rank: int, brought: Any = None, make: Callable[[list[Any]], Any] = list) -> Any:
        """Answered, when all have come, with what `make` gives for the list of what they have brought."""
        hub = self.hub
        with hub.changed:
            hub.check()
            self._brought[rank] = brought
            mine = self._round
            if len(self._brought) < len(self.ranks):
                while self._round == mine:
                    hub.check()
                    hub.changed.wait()
                return self._result
            everything, self._brought = [self._brought[one] for one in self.ranks], {}
        result = make(everything)  # nobody else can come before this round is over
        with hub.changed:
            self._round, self._result = mine + 1, result
            hub.changed.notify_all()
        return result
