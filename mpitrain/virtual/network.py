"""How long a message takes in virtual time.

Invariants: a network law turns (now, source, destination, bytes) into a time of arrival; what its links
are busy with is a plain object that the world owns. Messages between two ranks keep their order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mpitrain.errors import UsageError
from mpitrain.values import Value, register


@dataclass
class Links:
    """Until when each rank's outgoing and incoming link is taken, in seconds."""

    outgoing: dict[int, float] = field(default_factory=dict)
    incoming: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class NetworkLaw(Value):
    """Base of the network laws."""

    def arrival_s(self, links: Links, now_s: float, source: int, to: int, num_bytes: int) -> float:
        """When a message sent now has arrived completely."""
        raise NotImplementedError


@register("network", "ideal")
@dataclass(frozen=True, repr=False)
class Ideal(NetworkLaw):
    """Messages arrive at once."""

    def arrival_s(self, links: Links, now_s: float, source: int, to: int, num_bytes: int) -> float:
        return now_s


@register("network", "link")
@dataclass(frozen=True, repr=False)
class Link(NetworkLaw):
    """Every rank has one full-duplex link of its own that carries one message at a time (LogGP with a shared
    receiver): many workers pushing to one server queue at its link, which is where a parameter server
    saturates.

    Args:
        gbit_per_s: rate of each direction of a link.
        latency_s: time from the last bit sent on an idle path to the last bit received.
    """

    gbit_per_s: float = 10.0
    latency_s: float = 5e-5

    def check(self) -> None:
        if self.gbit_per_s <= 0 or self.latency_s < 0:
            raise UsageError(
                f"link: needs gbit_per_s > 0 and latency_s >= 0, got {self.gbit_per_s} and {self.latency_s}"
            )

    def arrival_s(self, links: Links, now_s: float, source: int, to: int, num_bytes: int) -> float:
        transfer_s = num_bytes * 8 / (self.gbit_per_s * 1e9)
        start_s = max(now_s, links.outgoing.get(source, 0.0))
        links.outgoing[source] = start_s + transfer_s
        arrival_s = max(start_s + self.latency_s, links.incoming.get(to, 0.0)) + transfer_s
        links.incoming[to] = arrival_s
        return arrival_s
