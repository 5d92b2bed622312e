"""The world of ranks that are threads: answers a role's effects with queues, in real time.

Invariants: a message is handed over as it is, and its payload without a copy: the receiver reads it, and gives it back
to whoever owns the memory. From one rank to another messages keep their order. A role never waits in a send. Whoever
waits is woken when another rank fails.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mpitrain.effects import (
    AllReduce,
    Begin,
    Break,
    Compute,
    Effect,
    Forget,
    Now,
    Recv,
    Role,
    Send,
    Sleep,
    drive,
)
from mpitrain.messages import release
from mpitrain.messages.steps import is_progress, step_after
from mpitrain.threads.hub import Hub


class ThreadWorld:
    """Runs one role on this thread.

    Args:
        hub: of the run; rank: this one.
        on_step: called with the role's step as it changes, for error messages.
        on_wait: called when the role begins (True) and ends (False) to wait for others.
        fails: carries out an injected failure.
        around: is held while a gradient is computed.
        reduce: one collective of an all-reduce: answers what this rank brings with what has come of it.
        begin: begins one; what it returns waits for the end, and answers as `reduce` does.
    """

    def __init__(
        self,
        hub: Hub,
        rank: int,
        on_step: Callable[[int], None] = lambda step: None,
        on_wait: Callable[[bool], None] = lambda waits: None,
        fails: Callable[[str, float], None] = lambda how, after_s: None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        reduce: Callable[[Any], Any] | None = None,
        begin: Callable[[Any], Callable[[], Any]] | None = None,
    ):
        self.hub, self.rank, self.inbox = hub, rank, hub.inboxes[rank]
        self.on_step, self.on_wait, self.fails, self.around = on_step, on_wait, fails, around
        self._reduce, self._begin = reduce, begin
        # the rounds of an all-reduce, and what waits for the end of the first
        self._begun: tuple[Generator[Any, Any, Any], Callable[[], Any]] | None = None
        self._forgotten: set[int] = set()
        self._reads_late_s = 0.0  # as injected
        self._start_s = time.monotonic()
        self._step = 0  # of the role, by the messages that it has sent

    def run(self, role: Role) -> Any:
        """Run `role` to its end and return what it returned."""
        return drive(role, self._answer)

    def close(self) -> None:
        """Nobody who comes late is answered here: the hub calls them off."""

    def _answer(self, effect: Effect) -> Any:
        self.hub.check()
        if isinstance(effect, Compute):
            with self.around() if effect.what == "gradient" else nullcontext():
                return effect.task()
        if isinstance(effect, Send):
            return self._send(effect)
        if isinstance(effect, Recv):
            return self._receive(effect.timeout_s)
        if isinstance(effect, Now):
            return time.monotonic() - self._start_s
        if isinstance(effect, Sleep):
            self.hub.failed.wait(effect.seconds)
            return self.hub.check()
        if isinstance(effect, Forget):
            if not effect.listen:
                self._forgotten.add(effect.rank)
            return None
        if isinstance(effect, Break):
            if effect.how == "slow_reader":
                self._reads_late_s = effect.after_s
                return None
            return self.fails(effect.how, effect.after_s)
        if isinstance(effect, Begin):
            assert self._begin is not None, "this world has no group to reduce over in the background"
            rounds = effect.reduction.rounds()
            self._begun = rounds, self._begin(next(rounds))
            return None
        assert isinstance(effect, AllReduce), f"{effect!r} is no effect"
        return self._all_reduce(effect)

    def _all_reduce(self, effect: AllReduce) -> Any:
        assert self._reduce is not None, "this world has no group to reduce over"
        if self._begun is None:
            return drive(effect.reduction.rounds(), self._reduce)
        (rounds, end), self._begun = self._begun, None
        return drive(rounds, self._reduce, end())

    def _send(self, effect: Send) -> None:
        message = effect.message
        if effect.to in self._forgotten:
            release(message)
            return
        if is_progress(message):
            self._step = step_after(message, self._step)
            self.on_step(self._step)
        self.hub.inboxes[effect.to].put((self.rank, message))

    def _receive(self, timeout_s: float | None) -> Any:
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                found = self.inbox.get_nowait()
            except queue.Empty:
                if timeout_s == 0:
                    return None
                found = self._wait(until_s)
            self.hub.check()
            if found is None:
                return None
            if self._reads_late_s:
                self.hub.failed.wait(self._reads_late_s)
                self.hub.check()
            if found[0] not in self._forgotten:
                return found
            release(found[1])

    def _wait(self, until_s: float | None) -> Any:
        """The next message, or None when the time is up."""
        self.on_wait(True)
        try:
            return self.inbox.get(timeout=None if until_s is None else max(0.0, until_s - time.monotonic()))
        except queue.Empty:
            return None
        finally:
            self.on_wait(False)
