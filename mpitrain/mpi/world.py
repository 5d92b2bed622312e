"""The world on a cluster: answers a role's effects over the messages of `messenger.py`.

Invariants: one role a rank, driven by the thread that owns MPI; the role is never blocked by a send.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator
from concurrent.futures import Executor, wait
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
from mpitrain.messages import Kind, Message
from mpitrain.mpi.engine.backoff import LONG_SLEEP_S, SHORT_SLEEP_S, yield_core
from mpitrain.mpi.engine.engine import Engine
from mpitrain.mpi.faults.self_destruct import self_destruct
from mpitrain.mpi.messenger import Messenger
from mpitrain.system.launched.ranks import Ends

_NOTHING = contextlib.nullcontext()


class MpiWorld:
    """Runs one role on this rank.

    Args:
        engine: the process's progress engine, driven inline.
        peers: ranks this role exchanges messages with.
        buffer_for: `buffer_for(source, kind) -> wire_buffer` to receive the payload of that rank's next message into.
        on_step: called with the role's step as it changes, for error messages.
        ends: of peers, and of the role.
        computer: computes gradients on a thread of its own; the thread that owns MPI drives messages meanwhile.
        reduce: one collective of an all-reduce: answers what this rank brings with what has come of it.
        begin: begins one; what it returns waits for the end, and answers as `reduce` does.
        room_bytes: of pushes that are received or wait for the role; others stay with their senders.
    """

    messenger_class: type[Messenger] = Messenger

    def __init__(
        self,
        engine: Engine,
        peers: tuple[int, ...],
        buffer_for: Callable[[int, Kind], Any],
        on_step: Callable[[int], None] = lambda step: None,
        computer: Executor | None = None,
        ends: Ends = Ends(),  # noqa: B008 - frozen
        reduce: Callable[[Any], Any] | None = None,
        begin: Callable[[Any], Callable[[], Any]] | None = None,
        room_bytes: float = math.inf,
    ):
        self.engine, self.on_step, self._ends = engine, on_step, ends
        answer = self._answer_late if ends.answer_late is not None else None
        self._messenger = self.messenger_class(engine, peers, buffer_for, on_step, ends, answer, room_bytes)
        self._computer, self._reduce, self._begin = computer, reduce, begin
        # the rounds of an all-reduce, and what waits for the end of the first
        self._begun: tuple[Generator[Any, Any, Any], Callable[[], Any]] | None = None
        self._start_s = time.monotonic()
        self._started = False

    def start(self) -> None:
        """Listen to every peer; `advance` calls it first where nobody has."""
        self._started = True
        self._messenger.start()

    def run(self, role: Role) -> Any:
        """Run `role` to its end, wait until everything it sent has left, and return what it returned."""
        answer = None
        while True:
            effect = self.advance(role, answer)
            if effect is None:
                return self._returned
            answer = self._carry_out(effect)

    def _carry_out(self, effect: Compute) -> Any:
        overlaps = self._computer is not None and effect.what == "gradient"
        return self._compute_and_drive(effect) if overlaps else effect.task()

    def _compute_and_drive(self, effect: Compute) -> Any:
        """Sleep between polls, even in mid-transfer: the core is for the gradient, and each poll moves what has
        queued up since."""
        assert self._computer is not None
        future = self._computer.submit(effect.task)
        while not future.done():
            self._raise_error()
            if not self._messenger.poll():
                wait((future,), SHORT_SLEEP_S)
        return future.result()

    def advance(self, role: Role, answer: object) -> Compute | None:
        """Run `role` up to its next `Compute`, which the caller carries out; None at its end."""
        # A program with a process group of its own has another thread drive MPI.
        with _NOTHING if self.engine.owns_mpi else self.engine.exclusive():
            if not self._started:
                self.start()
            while True:
                try:
                    effect = role.send(answer)
                except StopIteration as end:
                    self._returned = end.value
                    self._leave()
                    return None
                if isinstance(effect, Compute):
                    return effect
                answer = self._answer(effect)

    def _answer(self, effect: Effect) -> Any:
        if isinstance(effect, Send):
            self._messenger.send(effect.to, effect.message)
            return None
        if isinstance(effect, Recv):
            inbox = self._messenger.inbox
            self._messenger.open_to(effect.upto)
            if not inbox:
                self._messenger.poll()
            if effect.timeout_s == 0:
                return self._take_ready()
            if not inbox:
                self._wait(lambda: inbox, effect.timeout_s)
            self._raise_error()
            return self._messenger.take() if inbox else None
        if isinstance(effect, Sleep):
            return self._sleep(effect.seconds)
        if isinstance(effect, Forget):
            return self._messenger.forget(effect.rank, effect.listen)
        if isinstance(effect, Break):
            return self._break(effect)
        if isinstance(effect, Begin):
            assert self._begin is not None, "this world has no group to reduce over in the background"
            rounds = effect.reduction.rounds()
            self._begun = rounds, self._begin(next(rounds))
            return None
        if isinstance(effect, AllReduce):
            assert self._reduce is not None, "this world has no group to reduce over"
            if self._begun is None:
                return drive(effect.reduction.rounds(), self._reduce)
            (rounds, end), self._begun = self._begun, None
            return drive(rounds, self._reduce, end())
        assert isinstance(effect, Now), f"{effect!r} is no effect"
        return time.monotonic() - self._start_s

    def _break(self, order: Break) -> None:
        if order.how == "torn":
            self._messenger.tear_next = True
        elif order.how == "slow_reader":
            self._messenger.late.seconds = order.after_s
        else:
            self_destruct(order.how, order.after_s)

    def _wait(self, predicate: Callable[[], Any], timeout_s: float | None) -> None:
        """Until `predicate()` holds, something is wrong or the time is up."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        messenger = self._messenger
        while not (
            messenger.wait_once(predicate, end_s) or (end_s is not None and time.monotonic() >= end_s)
        ):
            messenger.poll()

    def _take_ready(self) -> Any:
        """What has arrived; a peer's next message is asked for when the one before is here, so poll while it helps."""
        inbox = self._messenger.inbox
        while not inbox and self._messenger.poll():
            pass
        self._raise_error()
        return self._messenger.take() if inbox else None

    def _sleep(self, seconds: float) -> None:
        """Sleep between polls: messages arrive meanwhile, and only a transfer under way keeps the core."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._raise_error()
            if self._messenger.poll() or any(not op.passive for op in self.engine.outstanding):
                yield_core()
            else:
                time.sleep(min(left_s, LONG_SLEEP_S))

    def _raise_error(self) -> None:
        if self._messenger.error is not None:
            raise self._messenger.error

    def _leave(self) -> None:
        """Wait until everything that was sent has left, then withdraw the receives."""
        self._wait(self._messenger.has_left, self._ends.leave_s)
        self._raise_error()
        self._messenger.end()

    def _answer_late(self, source: int, message: Message) -> None:
        """Answer one that was given up, and speaks after the role has ended."""
        assert self._ends.answer_late is not None
        drive(self._ends.answer_late(source, message), self._answer)

    def close(self) -> None:
        """Nobody is answered any more."""
        self._messenger.close()
