"""Peers without a server: each trains on its own replica and sends the others what has become of it.

    full topology       z_i = what the peer's optimizer would change, q_i = C(r_i + z_i), r_i the residual;
                        every peer takes x <- x - (1/N) sum over i of q_i
    others (gossip)     x_i <- x_i - step;  q_i = C(x_i - xhat_i);  everybody's copy xhat_i <- xhat_i + q_i;
                        x_i <- x_i + gamma sum over j of w_ij (xhat_j - xhat_i)

Full topology with a threshold is Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing",
Interspeech 2015. Gossip without a codec is D-PSGD, step first (Lian et al., NIPS 2017), with one it is ChocoSGD
(Koloskova, Stich and Jaggi, ICML 2019). Invariants: whom a peer sends to, hears from and meets is decided here
and in `topology.py`, from counts alone.
"""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from mpitrain.codecs.base import Codec
from mpitrain.codecs.none import Uncompressed
from mpitrain.errors import UsageError
from mpitrain.strategies import topology
from mpitrain.strategies.base import Strategy
from mpitrain.strategies.warmup import Warmup
from mpitrain.values import register

MOST_COMPLETE = 64  # peers that all tell one another, unless that is written out
# ChocoSGD's gamma where none is given: numbers that all arrive, if rounded, let peers move the whole way
SPARSE_GAMMA = 0.1


@register("strategy", "decentralized")
class Decentralized(Strategy):
    """Every rank is a peer: all apply each other's updates, or each mixes its parameters with its neighbours'.

    Strom, Interspeech 2015 (all peers); Lian et al., NIPS 2017 (neighbours); Koloskova et al., ICML 2019
    (with a codec).

    Args:
        topology: "full", "ring", "torus" or "exponential" (`strategies/topology.py`). Where it is left out it is
            "full", in which each of N peers sends N - 1 messages a step, and more than 64 workers are refused.
        codec: what travels in place of float32 numbers.
        asynchronous: peers go on with what has arrived and never wait for one another, but at meetings.
        resync: every so many steps all peers meet and take the mean of their parameters, in full; 0 for only at the
            end. What a codec has kept back stays to be sent.
        warmup: how many peers train at first; the others join from their mean.
        gamma: of ChocoSGD, the share of the difference to the copies by which a peer moves; 0 chooses 1 where all
            numbers travel (in 32, 16 or 8 bits) and 0.1 otherwise. The fewer travel, the smaller it has to be.
    """

    topology: str | None = None
    codec: Codec = field(default=Uncompressed(), metadata={"kind": "codec"})
    asynchronous: bool = False
    resync: int = 0
    warmup: Warmup = field(default=Warmup(), metadata={"kind": "warmup"})
    gamma: float = 0.0

    sends_messages: ClassVar[bool] = True
    wire_fields: ClassVar[tuple[str, ...]] = ("codec",)
    worker_role: ClassVar[str] = "peer"
    steps_on_workers = True

    def check(self) -> None:
        topology.check_topology(self.graph)
        if self.resync < 0:
            raise UsageError(f"decentralized: resync must not be negative, got {self.resync}; 0 is off")
        if not 0 <= self.gamma <= 1:
            raise UsageError(f"decentralized: gamma must be in [0, 1], got {self.gamma}; 0 chooses it")
        if self.gamma and not self.mixes:
            raise UsageError(
                'decentralized: gamma mixes parameters, and with topology="full" updates are exchanged'
            )
        if self.mixes and float(getattr(self.codec, "momentum", 0.0)):
            raise UsageError(
                f"decentralized: {self.codec} keeps a momentum of gradients, and topology={self.topology!r} exchanges "
                'parameters; use topology="full", or the optimizer\'s momentum'
            )

    def check_workers(self, num_workers: int) -> None:
        if self.topology is None and num_workers > MOST_COMPLETE:
            raise UsageError(
                f"{self}: without a topology each of {num_workers} workers sends {num_workers - 1} messages a step, "
                f"{num_workers * (num_workers - 1):,} in all: give one that scales, "
                'topology="ring", "torus" or "exponential", or insist on it with topology="full"'
            )

    def messages_to_workers(self, num_workers: int) -> int:
        return len(self.receivers(0, num_workers, 0))

    @property
    def graph(self) -> str:
        """The topology in force."""
        return self.topology or "full"

    @property
    def family(self) -> str:
        return (
            f"gossip over topology={self.topology!r}" if self.mixes else "peers that tell all their updates"
        )

    @property
    def mixes(self) -> bool:
        return self.graph != "full"

    @property
    def is_static(self) -> bool:
        """Whether a peer hears from the same ones at every step: it must where copies are kept up to date."""
        return self.graph != "exponential" or self.asynchronous or not self.codec.is_none

    @property
    def mixing_rate(self) -> float:
        """gamma in force."""
        return self.gamma or (1.0 if self.codec.sends_all else SPARSE_GAMMA)

    def _at(self, step: int) -> int | None:
        return None if self.is_static else step

    def weights(self, rank: int, number: int, step: int) -> dict[int, float]:
        """What each peer's parameters weigh for `rank` at `step`, its own included."""
        return topology.mixing_weights(self.graph, rank, number, self._at(step))

    def receivers(self, rank: int, number: int, step: int) -> tuple[int, ...]:
        """Whom `rank` sends to at `step`."""
        return topology.receivers(self.graph, rank, number, self._at(step))

    def senders(self, rank: int, number: int, step: int) -> tuple[int, ...]:
        """Whom `rank` hears from at `step`."""
        return topology.senders(self.graph, rank, number, self._at(step))

    def contacts(self, rank: int, number: int) -> tuple[int, ...]:
        """Whom `rank` ever exchanges messages with: during the warm-up, after it, and at meetings."""
        numbers = {number, min(self.warmup.workers, number) if self.warmup.epochs else number}
        found: set[int] = set(topology.tree(rank, number))
        for size in numbers:
            if rank < size:
                found |= set(topology.contacts(self.graph, rank, size, self.is_static))
        return tuple(sorted(found))

    @property
    def never_meets(self) -> bool:
        return self.asynchronous and not self.resync

    def meets_after(self, step: int) -> bool:
        """Whether a resynchronisation follows this step (from 0)."""
        return self.resync > 0 and (step + 1) % self.resync == 0
