"""What a server hears: messages, and the silence of those who owe it a sign of life.

Invariants: signs of life are taken in here and go no further; a silence that has lasted for too long comes out as
the message that the worker is lost, whose `how` is `SILENT`. Time is measured on a clock that stands while this
server does, so after a pause of its own nobody is late. Where nobody can be too late (a floor without end) and nobody
is lost, no time is measured.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Generator
from typing import Any

from mpitrain.effects import Effect, Now, Recv, Send
from mpitrain.messages import Alive, AmongServers, Announced, Away, Lost, Message, Push
from mpitrain.roles.failure_detector.silence import SilenceTracker

LOOK_EVERY_S = 0.5
SILENT = "silent"


class FailureDetector:
    """One server's ear.

    Args:
        tracker: the server's.
        is_lost: whether a worker is lost; its silence is nothing new.
        by_heartbeat: nobody else reports a death: whoever is overdue is lost, although nobody waits for it. Its
            workers then say that they wait (`ServerProbe`), so every one of them owes signs of life at all times, and
            no payload stays with its sender: signs that were sent behind it would not be heard.
        upto: for whose payloads there is room, as in `Recv`.
    """

    def __init__(
        self,
        tracker: SilenceTracker,
        is_lost: Callable[[int], bool],
        by_heartbeat: bool,
        upto: Callable[[], int | None] = lambda: None,
    ):
        self.tracker, self.is_lost, self.by_heartbeat = tracker, is_lost, by_heartbeat
        self.announced: set[int] = set()  # who has pushed, and keeps the payload until there is room for it
        self._upto = upto
        self.now_s = self._next_look_s = 0.0
        self.looks = not math.isinf(tracker.least_silence_s)  # whether time matters
        self._last_s: float | None = None
        self._overdue: deque[int] = deque()

    def listen(
        self, owing: Collection[int], away_s: float = math.inf
    ) -> Generator[Effect, Any, tuple[int, Message] | None]:
        """The next message, or None if there was nothing but a sign of life or `LOOK_EVERY_S` of quiet. `owing`: who
        must not be silent; `away_s`: how long the first validation of one of them may take."""
        self._look(owing, away_s)
        while self._overdue:
            if (worker := self._overdue.popleft()) in owing:
                return worker, Lost(SILENT)
        arrived = yield from self._receive(owing)
        if arrived is None:
            return None
        source, message = arrived
        if isinstance(message, Alive) and not self.is_lost(source):
            self.tracker.reports_waiting(source, self.now_s)
            yield Send(source, Alive())
            return None
        if isinstance(message, AmongServers):  # of another server, which nobody watches
            return source, message
        if self.looks and not isinstance(message, Lost) and not self.is_lost(source):
            self.tracker.heard(source, self.now_s)
        if self.announced and isinstance(message, Push | Lost):
            self.announced.discard(source)
        if isinstance(message, Away):
            self.tracker.goes_away(source, message.for_part)
            return None
        return source, message

    def _receive(self, owing: Collection[int]) -> Generator[Effect, Any, tuple[int, Message] | None]:
        """The next message but for announced pushes, which are noted; None after a while without one."""
        while True:
            upto = None if self.by_heartbeat else self._upto()
            timeout_s = LOOK_EVERY_S if self.looks else None
            arrived: tuple[int, Message] | None = yield Recv(timeout_s, "a message", owing, upto)
            if self.looks:
                self._tick((yield Now()))
            if arrived is None or type(arrived[1]) is not Announced:
                return arrived
            self.announced.add(arrived[0])
            if self.looks and not self.is_lost(arrived[0]):
                self.tracker.heard(arrived[0], self.now_s)

    def _look(self, owing: Collection[int], away_s: float) -> None:
        if self.by_heartbeat and self.now_s >= self._next_look_s:
            self._next_look_s = self.now_s + LOOK_EVERY_S
            self._overdue.extend(
                worker for worker in sorted(owing) if self.tracker.is_overdue(worker, self.now_s, away_s)
            )

    def _tick(self, now_s: float) -> None:
        self._last_s = now_s if self._last_s is None else self._last_s
        self.now_s += min(now_s - self._last_s, 2 * LOOK_EVERY_S)
        self._last_s = now_s
