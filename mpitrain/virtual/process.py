"""What a rank in virtual time is at, and what may happen to it besides a message."""

from __future__ import annotations

from collections import deque
from typing import Any

from mpitrain.effects import Recv, Role, Send
from mpitrain.virtual.compute import WorkerTimes
from mpitrain.virtual.traces import VirtualTrace


class Process:
    """One rank: its role, and what it waits for or computes."""

    __slots__ = (
        "awaited", "computing", "finished", "inbox", "last_sent", "late_s", "num_waits", "rank", "result", "role",
        "tears", "times", "trace", "waiting", "waits_since_s",
    )  # fmt: skip

    def __init__(self, rank: int, role: Role):
        self.rank, self.role = rank, role
        self.inbox: deque[tuple[int, Any]] = deque()
        self.waiting = False
        self.computing: Computed | None = None
        self.num_waits = 0
        self.times: WorkerTimes | None = None
        self.awaited, self.waits_since_s = Recv(), 0.0
        self.last_sent: Send | None = None
        self.finished = self.tears = False
        self.late_s = 0.0  # after a message is there it is read, as injected
        self.result: Any = None
        self.trace: VirtualTrace | None = None


class Torn:
    """A payload that has not arrived as it was sent."""


class FlowEnds:
    """The next message may have passed its last link, unless others have delayed it since."""


class TimeUp:
    """A `Recv` that has waited long enough, if it is still the same one."""

    def __init__(self, wait: int):
        self.wait = wait


class Computed:
    """A gradient (or a sleep's None, or what an all-reduce has come to) that will be there when its time has passed,
    unless a message breaks it off."""

    def __init__(self, result: Any, interruptible: bool, took_s: float = 0.0, sleeps: bool = False):
        self.result, self.interruptible, self.took_s, self.sleeps = result, interruptible, took_s, sleeps
        self.broken_off = False
