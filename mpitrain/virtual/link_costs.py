"""What a message between two ranks costs under a network law, for the formulas of `collectives.py`.

Invariants: links are idle; nothing is sent.
"""

from __future__ import annotations

from mpitrain.virtual.message_law import POST_S, LinkCost
from mpitrain.virtual.network import ALL_NODES, Cluster, Ideal, Link, Links, MeasuredNetwork, NetworkLaw

_PROBE_BYTES = 1 << 20


def link_cost(network: NetworkLaw, source: int = 0, to: int = 1, num_nodes: int = 0) -> LinkCost:
    """What a message between two ranks costs under a network law, on idle links. `num_nodes`: of a collective, in which
    all of them send at once; 0: nobody else sends."""
    if isinstance(network, Ideal):
        return LinkCost()
    if isinstance(network, Link):
        return LinkCost(network.latency_s, 8 / (network.gbit_per_s * 1e9), post_s=POST_S)
    if isinstance(network, Cluster | MeasuredNetwork):
        hops = network.path(Links(num_nodes=num_nodes), source, to)
        alpha_s = sum(hop.latency_s for hop in hops)
        rates = [hop.rate / (num_nodes if hop.link == ALL_NODES else 1) for hop in hops]
        return LinkCost(alpha_s, 1 / min(rates), 0.0, POST_S, network.eager_bytes, network.shares_fairly)
    empty_s = network.arrival_s(Links(), 0.0, source, to, 0)
    whole_s = network.arrival_s(Links(), 0.0, source, to, _PROBE_BYTES)
    return LinkCost(empty_s, (whole_s - empty_s) / _PROBE_BYTES, post_s=POST_S)
