"""How long a message takes in virtual time.

Invariants: a network law turns (now, source, destination, bytes) into a time of arrival; what its links
are busy with is a plain object that the world owns. Messages between two ranks keep their order. Links serve messages
first come, first served; a law that shares them fairly names the links of a path, and `fair_sharing` does the rest.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.errors import UsageError
from mpitrain.values import Value, register

BYTES_PER_S = 1e9 / 8  # of one Gbit/s
SHARINGS = ("fcfs", "fair")
LinkName = tuple[str, int]
ALL_NODES: LinkName = ("all nodes", 0)  # what they send one another passes it


@dataclass
class Links:
    """Until when each link is taken, in seconds.

    Attributes:
        outgoing, incoming: of each rank's own link, by rank.
        shared: of each other link, by its name.
        nodes: node of every rank, where the law does not say it; num_nodes: how many there are, 0 where nobody knows.
        hosts: ranks that keep their data in host memory, such as servers, where others keep them in a device's.
    """

    outgoing: dict[int, float] = field(default_factory=dict)
    incoming: dict[int, float] = field(default_factory=dict)
    shared: dict[LinkName, float] = field(default_factory=dict)
    nodes: Sequence[int] = ()
    hosts: Collection[int] = ()
    num_nodes: int = 0


class Hop(NamedTuple):
    """One link of a path.

    Args:
        link: its name; rate: bytes per second; latency_s: of the way to it from the one before.
    """

    link: LinkName
    rate: float
    latency_s: float = 0.0


@dataclass(frozen=True, repr=False)
class NetworkLaw(Value):
    """Base of the network laws."""

    def arrival_s(self, links: Links, now_s: float, source: int, to: int, num_bytes: int) -> float:
        """When a message sent now has arrived completely."""
        raise NotImplementedError

    def nodes(self, num_ranks: int) -> tuple[int, ...] | None:
        """The node of every rank; None: the law knows no nodes."""
        return None

    @property
    def eager_bytes(self) -> int:
        """Messages of more bytes than this wait for their receiver, as a rendezvous; 0: none does."""
        return 0

    @property
    def shares_fairly(self) -> bool:
        """Whether messages share links, so that those sent later delay those under way: `path` is asked then."""
        return False

    def path(self, links: Links, source: int, to: int) -> list[Hop]:
        """The links that a message passes, in order."""
        raise NotImplementedError


@register("network", "ideal")
class Ideal(NetworkLaw):
    """Messages arrive at once."""

    def arrival_s(self, links: Links, now_s: float, source: int, to: int, num_bytes: int) -> float:
        return now_s


@register("network", "link")
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


@register("network", "cluster")
class Cluster(NetworkLaw):
    """Nodes of several ranks. The ranks of a node share its adapter, each direction of which carries one message at a
    time, or shares its rate fairly among the pairs of ranks that send. Ranks are numbered node by node; servers stand
    where the strategy's `placement` puts them.

    Args:
        ranks_per_node: consecutive ranks on a node.
        gbit_per_s: rate of each direction of a node's adapter.
        latency_s: between two nodes.
        local_gbit_per_s: rate of each direction of a rank's link to others of its node.
        local_latency_s: between two ranks of a node.
        device_gbit_per_s: rate of each direction between host memory and a worker's device; data are copied in pieces
            while they are under way. 0: nothing is copied. Servers compute in host memory.
        nodes_per_switch: consecutive nodes under one switch, whose link to all others is shared. 0: no such link.
        oversubscription: what the nodes under a switch could send, in multiples of what its link to others carries.
        sharing: "fcfs", first come, first served, or "fair": max-min fair among pairs of ranks.
        busy_gbit_per_s: what each node gets while all nodes send and receive at once, where switches or hosts carry
            less than all adapters together; of fewer messages each gets more. 0: as much as alone.
        eager_bytes: messages of more bytes wait for their receiver (`rendezvous.py`), as MPI sends what is longer than
            its eager limit. 0: none waits.
    """

    ranks_per_node: int = 1
    gbit_per_s: float = 10.0
    latency_s: float = 5e-5
    local_gbit_per_s: float = 80.0
    local_latency_s: float = 1e-6
    device_gbit_per_s: float = 0.0
    nodes_per_switch: int = 0
    oversubscription: float = 1.0
    sharing: str = "fcfs"
    busy_gbit_per_s: float = 0.0
    eager_bytes: int = 0

    def check(self) -> None:
        for key in ("gbit_per_s", "local_gbit_per_s", "oversubscription"):
            self.hold(key, 0 < getattr(self, key) < math.inf, "must be finite and greater than 0")
        for key in ("latency_s", "local_latency_s", "device_gbit_per_s", "busy_gbit_per_s"):
            self.hold(key, 0 <= getattr(self, key) < math.inf, "must be finite and not negative")
        self.hold("ranks_per_node", self.ranks_per_node >= 1, "must be at least 1")
        self.hold("eager_bytes", self.eager_bytes >= 0, "must not be negative")
        self.hold("nodes_per_switch", self.nodes_per_switch >= 0, "must not be negative")
        self.hold("sharing", self.sharing in SHARINGS, f"must be one of {', '.join(SHARINGS)}")
        if self.oversubscription != 1 and not self.nodes_per_switch:
            raise UsageError(
                f"{self.name}: oversubscription needs nodes_per_switch, the nodes that share a switch"
            )

    @property
    def shares_fairly(self) -> bool:
        return self.sharing == "fair"

    def nodes(self, num_ranks: int) -> tuple[int, ...]:
        return tuple(rank // self.ranks_per_node for rank in range(num_ranks))

    def path(self, links: Links, source: int, to: int) -> list[Hop]:
        """The device's link and the adapter of the one, switches, the adapter and the device's link of the other."""
        one, other = (links.nodes[r] if links.nodes else r // self.ranks_per_node for r in (source, to))
        device = self.device_gbit_per_s * BYTES_PER_S
        hops = [Hop(("device out", source), device)] if device and source not in links.hosts else []
        if one == other:
            rate = self.local_gbit_per_s * BYTES_PER_S
            hops += [Hop(("local out", source), rate), Hop(("local in", to), rate, self.local_latency_s)]
        else:
            rate = self.gbit_per_s * BYTES_PER_S
            hops.append(Hop(("node out", one), rate))
            if self.busy_gbit_per_s and links.num_nodes:
                hops.append(Hop(ALL_NODES, self.busy_gbit_per_s * BYTES_PER_S * links.num_nodes))
            if self.nodes_per_switch and one // self.nodes_per_switch != other // self.nodes_per_switch:
                up = rate * self.nodes_per_switch / self.oversubscription
                hops.append(Hop(("switch up", one // self.nodes_per_switch), up))
                hops.append(Hop(("switch down", other // self.nodes_per_switch), up))
            hops.append(Hop(("node in", other), rate, self.latency_s))
        if device and to not in links.hosts:
            hops.append(Hop(("device in", to), device))
        return hops

    def arrival_s(self, links: Links, now_s: float, source: int, to: int, num_bytes: int) -> float:
        """A link passes on what it receives, so the slowest one of the path sets the pace, and each is taken for as
        long as the bytes take on it."""
        begin_s = end_s = now_s
        for link, rate, latency_s in self.path(links, source, to):
            begin_s = max(begin_s + latency_s, links.shared.get(link, 0.0))
            links.shared[link] = free_s = begin_s + num_bytes / rate
            end_s = max(end_s + latency_s, free_s)
        return end_s


@register("network", "gbe1")
class GigabitEthernet(Cluster):
    """A `cluster` on gigabit Ethernet: 118.2 MB/s and 23.6 us through a switch (NW-Grid, "Gigabit Ethernet MPI
    Performance Tests", http://www.nw-grid.ac.uk/LivMPI, Broadcom BCM5704)."""

    gbit_per_s: float = 0.9456
    latency_s: float = 23.6e-6


@register("network", "gbe10")
class TenGigabitEthernet(Cluster):
    """A `cluster` on 10 Gbit/s Ethernet, the nominal rate (IEEE 802.3ae). The latency is assumed: that of gbe1, most of
    which is the protocol's in the operating system."""

    gbit_per_s: float = 10.0
    latency_s: float = 23.6e-6


@register("network", "gbe100")
class HundredGigabitEthernet(Cluster):
    """A `cluster` on 100 Gbit/s Ethernet, the nominal rate (IEEE 802.3ba). The latency is assumed: that of gbe1, most
    of which is the protocol's in the operating system."""

    gbit_per_s: float = 100.0
    latency_s: float = 23.6e-6


@register("network", "hdr")
class Hdr(Cluster):
    """A `cluster` on HDR InfiniBand, 200 Gbit/s nominal: 192 Gbit/s and 1.2 us (Microsoft, "HBv3-series virtual machine
    performance"; it prints GB/s for Gbit/s)."""

    gbit_per_s: float = 192.0
    latency_s: float = 1.2e-6


@register("network", "ndr")
class Ndr(Cluster):
    """A `cluster` on NDR InfiniBand: 400 Gbit/s and less than 2 us, of which 2 are taken (Microsoft, "HBv4-series
    virtual machine performance")."""

    gbit_per_s: float = 400.0
    latency_s: float = 2e-6


@register("network", "slingshot")
class Slingshot(Cluster):
    """A `cluster` on Slingshot 11: 200 Gbit/s an adapter (https://glennklockwood.com/garden/slingshot; De Sensi et al.,
    "An In-Depth Analysis of the Slingshot Interconnect", 2020, for its switches). The latency is assumed: ndr's."""

    gbit_per_s: float = 200.0
    latency_s: float = 2e-6


@register("network", "measured")
class MeasuredNetwork(NetworkLaw):
    """A `cluster` with the medians of what `mpitrain doctor --comm --json FILE` has measured between nodes and within
    them. The link inside a node is left as a cluster has it where the file has one rank a node. Where the file says
    what a message takes while all nodes send at once, the latency between nodes is that one: ranks of a job wait for
    one another, so they send at once.

    Args:
        file: that it wrote.
        ranks_per_node: consecutive ranks on a node; 0: as many as were measured.
        sharing: "fcfs" or "fair".
    """

    file: str
    ranks_per_node: int = 0
    sharing: str = "fcfs"

    def check(self) -> None:
        object.__setattr__(self, "_cluster", self._read())

    def _read(self) -> Cluster:
        try:
            found: dict[str, Any] = json.loads(Path(self.file).read_text(encoding="utf-8"))
            between, within = found["between_nodes"], found["within_nodes"]
            nodes = found["nodes"]
            figures: dict[str, Any] = {}
            for prefix, rows in (("", between), ("local_", within)):
                if rows:
                    latency_s = statistics.median(row["latency_s"] for row in rows)
                    rate = statistics.median(row["bytes_per_s"] for row in rows)
                    figures |= {f"{prefix}latency_s": latency_s, f"{prefix}gbit_per_s": rate / BYTES_PER_S}
            figures["eager_bytes"] = int(found.get("eager_bytes", 0))
            if between and (busy := found.get("all_nodes_at_once")):
                figures["latency_s"] = max(figures["latency_s"], float(busy["latency_s"]))
                rate = float(busy["bytes_per_s"]) / BYTES_PER_S
                figures["busy_gbit_per_s"] = rate if rate < figures["gbit_per_s"] else 0.0
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"measured: cannot read {self.file!r} ({error}): write it with mpitrain doctor --comm --json FILE"
            ) from error
        ranks_per_node = self.ranks_per_node or max(nodes.count(node) for node in nodes)
        if not between:  # one node: there is but one, however many ranks
            if self.ranks_per_node:
                raise UsageError(
                    f"measured: {self.file!r} was measured on one node and says nothing of links between nodes: "
                    f"leave out ranks_per_node, or run the doctor on two nodes or more"
                )
            ranks_per_node = 1 << 30
        return Cluster(ranks_per_node=ranks_per_node, sharing=self.sharing, **figures)

    @property
    def cluster(self) -> Cluster:
        """The cluster that was measured."""
        cluster: Cluster = getattr(self, "_cluster")  # noqa: B009 - no field: the file says it
        return cluster

    @property
    def eager_bytes(self) -> int:
        return self.cluster.eager_bytes

    @property
    def shares_fairly(self) -> bool:
        return self.cluster.shares_fairly

    def nodes(self, num_ranks: int) -> tuple[int, ...]:
        return self.cluster.nodes(num_ranks)

    def path(self, links: Links, source: int, to: int) -> list[Hop]:
        return self.cluster.path(links, source, to)

    def arrival_s(self, links: Links, now_s: float, source: int, to: int, num_bytes: int) -> float:
        return self.cluster.arrival_s(links, now_s, source, to, num_bytes)
