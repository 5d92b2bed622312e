"""What a rule is told and what it answers.

Law of this folder: a rule decides and does nothing else. It is a frozen value; its memory is a plain
JSON-able dict that the role owns and hands in; it never touches a tensor, a clock, a message or the network,
and it never asks which world it is in.

A server role asks `on_push` once per arriving push. The verdict says how much the gradient weighs (0 drops
it), whether what has been gathered is applied now (a new version, with the mean of what was gathered), and
which of the waiting workers may read the model and go on.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpitrain.errors import UsageError
from mpitrain.rules.damping import Damping, Keep
from mpitrain.rules.warmup import Warmup
from mpitrain.text import Value, nearest


class Push(NamedTuple):
    """One arriving gradient.

    worker: who computed it; step: the worker's own count of pushes, from 0; read: the version it was computed
    on; version: the shard's version now; now_s: the world's clock in seconds; held: workers waiting for an
    answer, the pusher included; active: workers that take part now, the pusher included.
    """

    worker: int
    step: int
    read: int
    version: int
    now_s: float
    held: Set[int]
    active: Set[int]


class Verdict(NamedTuple):
    """The answer to a push, or to a worker's leaving.

    weight of the gradient (0 drops it); flush: apply the mean of what was gathered, a new version; release:
    who reads the model and goes on; late: it was dropped because its version is over, not for its staleness;
    restart: who is told to drop what it computes and to read the model (virtual time only).
    """

    weight: float
    flush: bool
    release: tuple[int, ...]
    late: bool = False
    restart: tuple[int, ...] = ()


WIRES = ("full", "float16", "bfloat16")
NOTHING = Verdict(0.0, False, ())


@dataclass(frozen=True, repr=False)
class Strategy(Value):
    """Base of every value that `--strategy` accepts."""

    def num_servers(self) -> int:
        """Ranks this strategy takes away from the workers."""
        return 0

    def why_not_over_mpi(self) -> str:
        """Empty, or why only a virtual world can run it."""
        return ""


@dataclass(frozen=True, repr=False)
class ServerStrategy(Strategy):
    """Base of the parameter-server family: one server, every rule a setting of it.

    Args:
        servers: number of server ranks; each owns one contiguous shard with its own version, rule state and
            counts.
        damping: what a stale gradient is worth.
        warmup: how many workers train alone at first, and for how many epochs.
        push_wire, reply_wire: numbers on the wire, "full" as the model's own, or "float16", "bfloat16"; sums, optimizer
            and the final model stay in full.
    """

    servers: int = 1
    damping: Damping = field(default=Keep(), metadata={"kind": "damping"})
    warmup: Warmup = field(default=Warmup(), metadata={"kind": "warmup"})

    push_wire: str = "full"
    reply_wire: str = "full"

    def check(self) -> None:
        for wire in (self.push_wire, self.reply_wire):
            if wire not in WIRES:
                raise UsageError(f"{self.name}: unknown wire {wire!r}{nearest(wire, list(WIRES))}")
        if self.servers < 1:
            raise UsageError(f"{self.name}: servers must be at least 1, got {self.servers}")

    def num_servers(self) -> int:
        return self.servers

    def check_workers(self, num_workers: int) -> None:
        """Raise `UsageError` when so many workers, all in all, cannot run this rule."""

    def start(self, workers: tuple[int, ...]) -> dict[str, Any]:
        """The rule's memory before the first push, when `workers` take part."""
        raise NotImplementedError

    def on_push(self, memory: dict[str, Any], push: Push) -> Verdict:
        """Decide about one push; may change `memory` in place."""
        raise NotImplementedError

    def on_join(self, memory: dict[str, Any], worker: int, active: Set[int]) -> None:
        """`worker` takes part from now on (after the warm-up); `active` are those that did before."""

    def on_leave(self, memory: dict[str, Any], worker: int, held: Set[int], active: Set[int]) -> Verdict:
        """`worker` will push no more; `held` and `active` are those that remain. The verdict's weight means
        nothing.
        """
        return NOTHING

    def contributors(self, active: Set[int]) -> Set[int] | None:
        """Who contributes to the update being gathered, where that is known beforehand: then each gradient is
        added as soon as its turn in rank order comes, and few wait. None: all wait for the flush."""
        return None
