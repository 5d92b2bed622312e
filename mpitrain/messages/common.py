"""What messages are made of: their kinds, payloads, leases and requests for checkpoints.

Invariants: values that never change; a payload is opaque.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, TypeVar, dataclass_transform


class Kind(enum.IntEnum):
    """What a message is on the wire. Append, never renumber."""

    JOIN = 1
    REPLY = 2
    PUSH = 3
    DONE = 4
    FINAL = 5  # both the request and the model that answers it
    NOTE = 6
    PULL = 7
    DIFFERENCE = 8
    LOST = 9
    IDLE = 10
    WAKE = 11
    UPDATE = 12
    SUM = 13
    MEAN = 14
    ASK = 15
    AGREED = 16
    DELIVERED = 17
    LEAVE = 18
    SAVE = 19
    ALIVE = 20
    AWAY = 21
    LAST = 22
    DIVIDE = 23
    CLAIM = 24
    OVER = 25
    ASSIST = 26
    UNIT = 27
    MEASURED = 28
    ASK_AVERAGE = 29
    AVERAGE = 30
    PARTIAL_NORM = 31
    ENDED = 32
    ORDERED = 33
    CREDIT = 34
    PULL_ROWS = 35
    ROWS = 36
    BUNDLE = 37
    TOLD = 38
    ANNOUNCED = 39


@dataclass(frozen=True, slots=True)
class Sent:
    """Base of the messages."""

    kind: ClassVar[Kind]


M = TypeVar("M", bound=Sent)


@dataclass_transform(frozen_default=True)
def message(kind: Kind) -> Callable[[type[M]], type[M]]:
    """Class decorator: a message of this kind, which never changes."""

    def enter(cls: type[M]) -> type[M]:
        made = dataclass(frozen=True, slots=True)(cls)
        made.kind = kind
        return made

    return enter


class Payload(Protocol):
    """Bytes that a message carries beside its header."""

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""

    def statistics(self) -> dict[str, float]:
        """What the run's progress reports of them."""

    def stamp(self) -> int:
        """The number that the bytes bear at both ends, for as long as they stay what they are."""

    def release(self) -> None:
        """The holder no longer needs the bytes."""


class Lease(NamedTuple):
    """`num_samples` samples from position `start` of the global order of `epoch` (epochs count from 0): what one
    push covers. `batch_size`: to be cut into batches of so many; 0: it is one batch.
    """

    epoch: int
    start: int
    num_samples: int
    batch_size: int = 0

    def batches(self) -> list[Lease]:
        """The batches in it; the last one may be smaller."""
        return self.cut(self.batch_size)

    def cut(self, size: int) -> list[Lease]:
        """It in leases of `size` samples, of which the last one may be smaller; 0: in one."""
        size, end = size or self.num_samples, self.start + self.num_samples
        return [Lease(self.epoch, at, min(size, end - at)) for at in range(self.start, end, size)]


def num_parts(lease: Lease | None, size: int) -> int:
    """In how many batches of at most `size` samples a lease is computed; 0: in one."""
    return -(-lease.num_samples // size) if lease is not None and size else 1


class CheckpointRequest(NamedTuple):
    """When the next checkpoint is written.

    at: samples at which every shard writes it; None: as soon as the dealing server can name that point, because the
        sender has been asked to end.
    final: the run ends with it; the dealing server decides so.
    """

    at: int | None = None
    final: bool = False
