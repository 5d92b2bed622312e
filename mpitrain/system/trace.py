"""What each rank does in some of its steps, as a file for chrome://tracing and Perfetto: `--trace steps=50:60`.

Invariants: a run without a trace makes its objects without it (`watch`), so nothing asks at every step; what is asked
all the same reads one attribute. Outside the steps that were asked for nothing is recorded.
Spans of one thread lie within one another or apart, because a `with` statement records them; what is under way beside
them (messages, collectives) is recorded apart, as asynchronous events. The file is written when the last of the steps
is over, or when the run is. A world in virtual time makes one trace the active one for as long as that rank runs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mpitrain.errors import UsageError
from mpitrain.system.files.atomic import write_whole
from mpitrain.system.optional import optional

STEP, COMPUTE, OPTIMIZER, READ, CODEC = "step", "compute", "optimizer", "reader", "codec"
WAIT, COMMUNICATION, SERVER, OTHER = "wait", "communication", "server", "other"
KINDS = {"gradient": COMPUTE, "apply": SERVER, "validate": OTHER, "checkpoint": OTHER, "deliver": OTHER}
MOST_EVENTS = 500_000  # about 100 MB in the file
_STEPS = re.compile(r"steps=(\d+):(\d+)")

Function = TypeVar("Function", bound=Callable[..., Any])


class TraceSteps(NamedTuple):
    """The steps to trace, `first` up to but without `end`, counted from 0 as Python's slices are."""

    first: int
    end: int


def read_steps(text: str | None) -> TraceSteps | None:
    """What `--trace` says.

    Raises:
        UsageError: it is not `steps=FIRST:END`, or names no step.
    """
    if text is None:
        return None
    found = _STEPS.fullmatch("".join(str(text).split()))
    if found is None:
        raise UsageError(
            f"trace={text!r}: say steps=FIRST:END, such as steps=50:60 for the ten steps from 50 on"
        )
    steps = TraceSteps(int(found[1]), int(found[2]))
    if steps.end <= steps.first:
        raise UsageError(
            f"trace={text!r} names no step: END must be greater than FIRST, as in "
            f"steps={steps.first}:{steps.first + 10}"
        )
    return steps


def file_name(rank: int) -> str:
    """The trace of a rank, in the run directory."""
    return f"trace-rank-{rank}.json"


class Event(NamedTuple):
    """One span: on a thread, or, where `flight` is a number, beside the threads."""

    name: str
    category: str
    began_s: float
    ended_s: float
    thread: int
    flight: int
    args: dict[str, Any]


class Trace:
    """The trace of one rank.

    Args:
        steps: to record; path: of the file; rank, label: as the file calls the process.
        clock: seconds; zero_s: what it says at the file's time 0.
        batches_per_push: of a worker's steps, where this rank is a server and has none of its own.
        about: further facts for the file.
    """

    def __init__(
        self,
        steps: TraceSteps,
        path: Path,
        rank: int,
        label: str,
        clock: Callable[[], float] = time.monotonic,
        zero_s: float = 0.0,
        batches_per_push: int = 1,
        about: dict[str, Any] | None = None,
    ):
        self.steps, self.path, self.rank, self.label = steps, path, rank, label
        self.clock, self.zero_s, self.batches_per_push = clock, zero_s, batches_per_push
        self.about = about or {}
        self.events: list[Event] = []
        self.recording = self.written = False
        self.num_steps = self.num_dropped = 0
        self.issued_s = 0.0  # when the last collective was issued
        self._step: tuple[int, float] | None = None  # the one under way, and when it began
        self._flights: dict[int, tuple[str, str, float, dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._pushed: dict[int, int] = {}  # by worker: the batches before its last push
        self._thread_names = {threading.get_ident(): "main"}

    # ---- which steps

    def begin_step(self, number: int) -> None:
        """This rank begins a step: that ends the one before."""
        self._end_step()
        if self.written:
            return
        self._record(self.steps.first <= number < self.steps.end)
        if self.recording:
            self.num_steps += 1
            self._step = number, self.clock()
        elif self.num_steps:
            self.write()

    def hear_push(self, worker: int, step: int) -> None:
        """A server records from the first push of the steps on until every worker has come to their end."""
        batch = self._pushed[worker] = step * self.batches_per_push
        if self.written or batch < self.steps.first:
            return
        if min(self._pushed.values()) < self.steps.end:
            self._record(True)
        elif self.recording:
            self.write()

    def forget(self, worker: int) -> None:
        """This worker will push no more."""
        self._pushed.pop(worker, None)

    def _record(self, whether: bool) -> None:
        self.recording = whether
        if _now.trace is self:
            _now.recorder = self if whether else None

    def _end_step(self) -> None:
        if self._step is not None:
            number, began_s = self._step
            self._step = None
            self.add(f"step {number}", STEP, began_s, self.clock(), {"step": number})

    # ---- what is recorded

    def add(
        self, name: str, category: str, began_s: float, ended_s: float, args: dict[str, Any] | None = None,
        flight: int = -1,
    ) -> None:  # fmt: skip
        """A span of the calling thread, or of a flight."""
        thread = threading.get_ident()
        if flight < 0 and thread not in self._thread_names:
            self._thread_names[thread] = threading.current_thread().name
        if len(self.events) < MOST_EVENTS:
            self.events.append(Event(name, category, began_s, ended_s, thread, flight, args or {}))
        else:
            self.num_dropped += 1

    def begin_flight(self, name: str, category: str, args: dict[str, Any]) -> Callable[..., None]:
        """Something begins that is under way beside the threads; to be called when it is over."""
        number = next(self._numbers)
        self._flights[number] = name, category, self.clock(), args

        def land(*_: object) -> None:
            if (flight := self._flights.pop(number, None)) is not None and not self.written:
                self.add(*flight[:3], self.clock(), flight[3], number)

        return land

    # ---- the file

    def write(self) -> None:
        """End the step under way and write the file; nothing is recorded any more."""
        if self.written:
            return
        self._end_step()
        now_s = self.clock()
        for number, (name, category, began_s, args) in sorted(self._flights.items()):
            self.add(name, category, began_s, now_s, args | {"unfinished": True}, number)
        self._flights.clear()
        self._record(False)
        self.written = True
        if self.events:
            with optional(self.path):
                write_whole(self.path, json.dumps(self.content()) + "\n", tag=str(os.getpid()))
        self.events.clear()

    def content(self) -> dict[str, Any]:
        """What the file holds."""
        # of two of the same length the one that ended last is the outer one
        latest_first = list(reversed(list(self.events)))
        # only now: another thread may end its first span meanwhile, and names itself before that is among the events
        threads = {thread: number for number, thread in enumerate(list(self._thread_names))}
        rows: list[dict[str, Any]] = [
            self._about("process_name", {"name": self.label}),
            self._about("process_sort_index", {"sort_index": self.rank}),
        ]
        for thread, number in threads.items():
            rows.append(self._about("thread_name", {"name": self._thread_names[thread]}, number))
        for event in sorted(latest_first, key=lambda event: (event.began_s, -event.ended_s)):
            began, ended = self._microseconds(event.began_s), self._microseconds(event.ended_s)
            row: dict[str, Any] = {"name": event.name, "cat": event.category, "pid": self.rank}
            if event.flight < 0:
                row |= {"ph": "X", "ts": began, "dur": round(ended - began, 3), "tid": threads[event.thread]}
                rows.append(row | {"args": event.args})
            else:
                row |= {"id": f"{self.rank}.{event.flight}", "tid": 0}
                rows.append(row | {"ph": "b", "ts": began, "args": event.args})
                rows.append(row | {"ph": "e", "ts": ended})
        about = {"steps": f"{self.steps.first}:{self.steps.end}", "dropped_events": self.num_dropped}
        return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": about | self.about}

    def _about(self, name: str, args: dict[str, Any], thread: int = 0) -> dict[str, Any]:
        return {"name": name, "ph": "M", "ts": 0, "pid": self.rank, "tid": thread, "args": args}

    def _microseconds(self, time_s: float) -> float:
        """In the file; whole nanoseconds, so that rounding moves no span out of the one around it."""
        return round((time_s - self.zero_s) * 1e9) / 1e3


class _Now:
    """The trace that is active in this process, and the one that records now: the same, or none."""

    trace: Trace | None = None
    recorder: Trace | None = None
    is_on = False  # whether this process traces


_now = _Now()


def switch(whether: bool) -> None:
    """Say whether this process traces, before anything is made that `watch` would look at."""
    _now.is_on = whether


def is_on() -> bool:
    """Whether this process traces."""
    return _now.is_on


def activate(trace: Trace | None) -> None:
    """From here on what happens in this process belongs to this trace."""
    _now.trace = trace
    _now.recorder = trace if trace is not None and trace.recording else None


@contextlib.contextmanager
def active(trace: Trace) -> Iterator[None]:
    """`activate` for the length of a `with`."""
    before = _now.trace
    activate(trace)
    try:
        yield
    finally:
        activate(before)


def finish() -> int | None:
    """Write the active trace, and have none; returns how many steps it holds, or None where there was none."""
    trace = _now.trace
    activate(None)
    switch(False)
    if trace is None:
        return None
    trace.write()
    return trace.num_steps


def recorder() -> Trace | None:
    """The trace that records now."""
    return _now.recorder


def begin_step(number: int) -> None:
    """This rank begins a step."""
    if _now.trace is not None:
        _now.trace.begin_step(number)


def hear_push(worker: int, step: int) -> None:
    """A server has received a push."""
    if _now.trace is not None:
        _now.trace.hear_push(worker, step)


def forget(worker: int) -> None:
    """A worker will push no more."""
    if _now.trace is not None:
        _now.trace.forget(worker)


class _Span:
    __slots__ = ("args", "began_s", "category", "name", "trace")

    def __init__(self, trace: Trace, name: str, category: str, args: dict[str, Any]):
        self.trace, self.name, self.category, self.args = trace, name, category, args

    def __enter__(self) -> None:
        self.began_s = self.trace.clock()

    def __exit__(self, *_: object) -> None:
        if not self.trace.written:
            self.trace.add(self.name, self.category, self.began_s, self.trace.clock(), self.args)


class _NoSpan:
    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


_NO_SPAN = _NoSpan()


def span(name: str, category: str, **args: object) -> _Span | _NoSpan:
    """What happens within this `with`, by this thread."""
    if _now.recorder is None:
        return _NO_SPAN
    return _Span(_now.recorder, name, category, args)


def spanned(name: str, category: str) -> Callable[[Function], Function]:
    """Decorator: every call of the function is a span."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*arguments: object, **options: object) -> Any:
            with span(name, category):
                return function(*arguments, **options)

        return call  # type: ignore[return-value]

    return decorate


def watched(function: Function, name: str, category: str) -> Function:
    """The function, whose calls are spans where this process traces."""
    return spanned(name, category)(function) if _now.is_on else function


def watch(thing: object, **spans: tuple[str, str]) -> None:
    """Make spans (name, category) of the calls of these methods of an object, where this process traces. Without a
    trace the object stays as it is, so nothing asks at every call."""
    if _now.is_on:
        for method, (name, category) in spans.items():
            setattr(thing, method, spanned(name, category)(getattr(thing, method)))


def flight(name: str, **args: object) -> Callable[..., None] | None:
    """A message or collective begins its way; what is returned is to be called when it has come to its end. None where
    nothing is recorded."""
    if _now.recorder is None:
        return None
    _now.recorder.issued_s = _now.recorder.clock()
    return _now.recorder.begin_flight(name, COMMUNICATION, args)


@contextlib.contextmanager
def _waiting_at_the_end(trace: Trace, name: str) -> Iterator[None]:
    began_s = trace.clock()
    yield
    if trace.issued_s > began_s:
        trace.add(name, WAIT, trace.issued_s, trace.clock())


def waiting_at_the_end(name: str) -> contextlib.AbstractContextManager[None]:
    """After the last collective that is issued within this `with`, the thread only waits."""
    return contextlib.nullcontext() if _now.recorder is None else _waiting_at_the_end(_now.recorder, name)
