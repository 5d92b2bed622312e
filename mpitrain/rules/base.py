"""What a rule is told and what it answers.

Law of this folder: a rule decides and does nothing else. It is a frozen value; its memory is a plain
JSON-able dict that the role owns and hands in; it never touches a tensor, a clock, a message or the network,
and it never asks which world it is in.

A server role asks `on_push` once per arriving push. The verdict says how much the gradient weighs (0 drops
it), whether what has been gathered is applied now (a new version), and which of the waiting workers may read
the model and go on.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpitrain.errors import UsageError
from mpitrain.rules.damping import Keep
from mpitrain.text import Value


class Push(NamedTuple):
    """One arriving gradient.

    worker: who computed it; step: the worker's own count of pushes, from 0; read: the version it was computed
    on; version: the shard's version now; now_s: the world's clock in seconds; held: workers waiting for an
    answer, the pusher included.
    """

    worker: int
    step: int
    read: int
    version: int
    now_s: float
    held: Set[int]


class Verdict(NamedTuple):
    """The answer to a push: weight of the gradient (0 drops it), apply now, and who may go on."""

    weight: float
    flush: bool
    release: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Strategy(Value):
    """Base of every value that `--strategy` accepts."""

    def num_servers(self) -> int:
        """Ranks this strategy takes away from the workers."""
        return 0


@dataclass(frozen=True, repr=False)
class ServerStrategy(Strategy):
    """Base of the parameter-server family: one server, every rule a setting of it.

    Args:
        servers: number of server ranks; each owns one contiguous shard with its own version, rule state and
            counts.
        damping: what a stale gradient is worth.
    """

    servers: int = 1
    damping: Value = field(default=Keep(), metadata={"kind": "damping"})

    def check(self) -> None:
        if self.servers < 1:
            raise UsageError(f"{self.name}: servers must be at least 1, got {self.servers}")

    def num_servers(self) -> int:
        return self.servers

    def start(self, workers: tuple[int, ...]) -> dict[str, Any]:
        """The rule's memory before the first push."""
        raise NotImplementedError

    def on_push(self, state: dict[str, Any], push: Push) -> Verdict:
        """Decide about one push; may change `state` in place."""
        raise NotImplementedError
