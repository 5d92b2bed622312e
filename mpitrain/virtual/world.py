"""The world in virtual time: a heap of (time, serial, what happens), one thread, any number of ranks.

Invariants: nothing here knows a strategy or a role; it answers effects. Ties are broken by the order in
which events were made, every random draw is keyed by (seed, worker, number of the draw) whatever rank the worker
has, so a run is a pure function of its inputs and the number of servers changes no worker's times. When the heap is
empty and a rank still waits, that is a deadlock and is reported with the names of those who wait. Gradients are
computed for real, at the moment the task starts. The design follows SimPy's environment (processes that
yield what they wait for).
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from mpitrain.effects import (
    Break,
    Compute,
    Effect,
    Forget,
    Interrupted,
    Now,
    Recv,
    Role,
    Send,
    Sleep,
)
from mpitrain.errors import DeadlockError, LostRankError, WireError
from mpitrain.messages import Alive, Assist, Lost, Measured, payload_of
from mpitrain.system.trace import active
from mpitrain.virtual.compute import ComputeLaw
from mpitrain.virtual.network import Links, NetworkLaw
from mpitrain.virtual.ring import Reduce, Ring
from mpitrain.virtual.traces import VirtualTrace

DEADLY = ("kill", "segv", "raise")  # the others of `--inject` fall silent
MOST_LOOKS = 100_000  # of those who wait, while nothing happens but that somebody is silent
_CHANGES_NOTHING = Alive | Assist | Measured  # of what a worker computes
HEADER_BYTES = (
    160  # what a message costs on the wire beside its payload: the size of mpi/message_header.py's header
)


class _Process:
    def __init__(self, rank: int, role: Role):
        self.rank, self.role = rank, role
        self.inbox: deque[tuple[int, Any]] = deque()
        self.waiting = False
        self.computing: _Computed | None = None
        self.num_draws = self.num_waits = 0
        self.finished = self.tears = False
        self.result: Any = None
        self.trace: VirtualTrace | None = None


class VirtualWorld:
    """Runs roles in virtual time.

    Args:
        compute: law of the time one gradient of the usual size takes; applying and validating take none.
        network: law of the time a message takes.
        seed: key of every draw.
        may_die: ranks whose death is a message to the others (`Lost`), not an error.
        workers: ranks of the workers in order, where ranks are not their numbers.
    """

    def __init__(
        self,
        compute: ComputeLaw,
        network: NetworkLaw,
        seed: int = 0,
        may_die: Collection[int] = (),
        workers: Sequence[int] = (),
    ):
        self.compute, self.network, self.seed = compute, network, seed
        self.now_s = 0.0
        self.num_events = 0
        self.ended_s: dict[int, float] = {}  # by rank
        self.broken: dict[int, str] = {}  # by rank: how it failed, as `--inject` ordered
        self.traces: dict[int, VirtualTrace] = {}  # by rank, where what it does is recorded
        self._may_die = frozenset(may_die)
        self._numbers = {rank: number for number, rank in enumerate(workers)}
        self._num_looks = 0  # deadlines since anything else has happened
        self._links = Links()
        self._heap: list[tuple[float, int, _Process, Any]] = []
        self._serial = 0
        self._forgotten: set[int] = set()  # given up by somebody: nobody answers them any more
        self._num_pending = 0  # events other than deadlines
        self._processes: dict[int, _Process] = {}

    def run(self, roles: dict[int, Role], reduce: Reduce | None = None) -> dict[int, Any]:
        """Run every role to its end; returns what each returned, by rank. `reduce` carries out the collectives of
        roles that all-reduce.

        Raises:
            DeadlockError: somebody waits for a message that nobody will send.
        """
        if reduce is not None:
            ring = Ring(roles, reduce)
            roles = {rank: ring.follow(rank, role) for rank, role in roles.items()}
        self._processes = {rank: _Process(rank, role) for rank, role in roles.items()}
        for process in self._processes.values():
            process.trace = self.traces.get(process.rank)
            self._schedule(self.now_s, process, None)
        while self._heap:
            self.now_s, _, process, event = heapq.heappop(self._heap)
            self.num_events += 1
            self._num_pending -= not isinstance(event, _TimeUp)
            self._num_looks = self._num_looks + 1 if isinstance(event, _TimeUp) else 0
            if process.rank in self.broken:
                _throw_away(event)
            elif isinstance(event, Break):
                self._break(process, event.how)
            elif isinstance(event, tuple):
                self._deliver(process, event)
            elif isinstance(event, _TimeUp):
                if process.waiting and process.num_waits == event.wait:
                    process.waiting = False
                    self._advance(process, None)
            elif event is None:
                self._advance(process, None)
            elif not event.broken_off:
                process.computing = None
                if process.trace is not None:
                    process.trace.computed(event.took_s)
                self._advance(process, event.result)
        self.now_s = max(self.ended_s.values(), default=self.now_s)  # deadlines that nobody needed come later
        processes = self._processes.values()
        gone = self._forgotten | set(self.broken)
        waiting = [p.rank for p in processes if not p.finished and p.rank not in gone]
        if waiting:
            raise DeadlockError(
                f"deadlock at t={self.now_s:.3f} s: ranks {waiting} wait for a message that nobody has sent"
            )
        return {rank: process.result for rank, process in self._processes.items()}

    def _schedule(self, time_s: float, process: _Process, event: Any) -> None:
        self._serial += 1
        self._num_pending += not isinstance(event, _TimeUp)
        heapq.heappush(self._heap, (time_s, self._serial, process, event))

    def _break(self, process: _Process, how: str) -> None:
        """The rank is no more, or does nothing any more; those who can do without one that is dead are informed."""
        if process.finished:
            return
        self.broken[process.rank] = how
        process.result = {"rank": process.rank, "broken": how}
        for message in process.inbox:
            _throw_away(message)
        if how not in DEADLY:
            return
        if process.rank not in self._may_die:
            raise LostRankError(
                f"rank {process.rank} died ({how}) at t={self.now_s:.3f} s, and nobody can go on"
            )
        for other in self._processes.values():
            if other.rank not in self._may_die and not other.finished:
                self._send(process.rank, Send(other.rank, Lost()))

    def _waits_for_silent(self) -> bool:
        """Whether somebody may yet be given up: then time passes although nothing is under way."""
        silent = [rank for rank, how in self.broken.items() if how not in DEADLY]
        return bool(silent) and self._num_looks < MOST_LOOKS

    def _deliver(self, process: _Process, message: tuple[int, Any]) -> None:
        if isinstance(message[1], _Torn):
            raise WireError(f"payload of rank {message[0]} is torn: its stamps differ")
        process.inbox.append(message)
        breaks_off = not isinstance(message[1], _CHANGES_NOTHING)
        if process.computing is not None and process.computing.interruptible and breaks_off:
            if process.trace is not None:
                process.trace.computed(process.computing.took_s)
            process.computing.broken_off, process.computing = True, None
            self._advance(process, Interrupted())
        elif process.waiting:
            process.waiting = False
            self._advance(process, process.inbox.popleft())

    def _advance(self, process: _Process, answer: Any) -> None:
        """Run a role until it has to wait for a message or for time to pass."""
        trace = process.trace
        while True:
            try:
                effect: Effect = _send_on(process, answer)
            except StopIteration as end:
                process.finished, process.result = True, end.value
                self.ended_s[process.rank] = self.now_s
                if trace is not None:
                    trace.write()
                return
            answer = None
            if isinstance(effect, Send):
                self._send(process.rank, effect)
            elif isinstance(effect, Now):
                answer = self.now_s
            elif isinstance(effect, Compute):
                result = _carry_out(process, effect)
                if effect.what == "gradient":
                    took_s = effect.size * sum(self._draw(process) for _ in range(effect.num_batches))
                    process.computing = _Computed(result, effect.interruptible, took_s)
                    self._schedule(self.now_s + took_s, process, process.computing)
                    return
                answer = result
            elif isinstance(effect, Sleep):
                if trace is not None:
                    trace.sleep(effect.seconds)
                process.computing = _Computed(None, effect.interruptible)
                self._schedule(self.now_s + effect.seconds, process, process.computing)
                return
            elif isinstance(effect, Recv):
                if not process.inbox:
                    if effect.timeout_s == 0:
                        continue
                    process.waiting = True
                    process.num_waits += 1
                    if trace is not None:
                        trace.wait()
                    pending = self._num_pending or self._waits_for_silent()
                    if effect.timeout_s is not None and pending:  # else nobody is left who could send
                        self._schedule(self.now_s + effect.timeout_s, process, _TimeUp(process.num_waits))
                    return
                answer = process.inbox.popleft()
            elif isinstance(effect, Forget):
                if trace is not None:
                    trace.forget(effect.rank)
                self._forgotten.update(() if effect.listen else (effect.rank,))
            elif isinstance(effect, Break):
                if effect.how == "torn":
                    process.tears = True
                elif effect.after_s:
                    self._schedule(self.now_s + effect.after_s, process, effect)
                else:
                    self._break(process, effect.how)
                    return
            else:
                raise AssertionError(f"rank {process.rank} yielded {effect!r}, which is no effect")

    def _send(self, source: int, effect: Send) -> None:
        payload = payload_of(effect.message)
        num_bytes = HEADER_BYTES + (payload.num_bytes if payload is not None else 0)
        arrival_s = self.network.arrival_s(self._links, self.now_s, source, effect.to, num_bytes)
        sender = self._processes[source]
        if sender.trace is not None:
            sender.trace.send(effect.to, effect.message, arrival_s)
        message: Any = effect.message
        if sender.tears and payload is not None:
            sender.tears = False
            message = _Torn()
        self._schedule(arrival_s, self._processes[effect.to], (source, message))

    def _draw(self, process: _Process) -> float:
        worker = self._numbers.get(process.rank, process.rank)
        stream = random.Random(f"{self.seed}/{worker}/{process.num_draws}")
        process.num_draws += 1
        return self.compute.seconds(stream)


def _send_on(process: _Process, answer: Any) -> Effect:
    """The role's next effect."""
    if process.trace is None:
        return process.role.send(answer)
    process.trace.resume(answer)
    with active(process.trace):
        return process.role.send(answer)


def _carry_out(process: _Process, effect: Compute) -> Any:
    """The result of a task."""
    if process.trace is None:
        return effect.task()
    if effect.what != "gradient":
        return process.trace.run(effect.what, effect.task)
    process.trace.step(effect.step)
    return process.trace.compute(effect.task)


def _throw_away(event: Any) -> None:
    """Nobody is there to receive it."""
    if isinstance(event, tuple) and (payload := payload_of(event[1])) is not None:
        payload.release()


class _Torn:
    """A payload that has not arrived as it was sent."""


class _TimeUp:
    """A `Recv` that has waited long enough, if it is still the same one."""

    def __init__(self, wait: int):
        self.wait = wait


class _Computed:
    """A gradient (or a sleep's None) that will be there when its time has passed, unless a message breaks it off."""

    def __init__(self, result: Any, interruptible: bool, took_s: float = 0.0):
        self.result, self.interruptible, self.took_s = result, interruptible, took_s
        self.broken_off = False
