"""Clusters in virtual time, against closed forms: who waits for whom at which link, and what fair shares are."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest

from mpitrain.effects import Recv, Send
from mpitrain.errors import UsageError
from mpitrain.messages import Update
from mpitrain.values import parse
from mpitrain.virtual import Cluster, Constant, Link, MeasuredNetwork, VirtualWorld
from mpitrain.virtual.link_costs import link_cost
from mpitrain.virtual.network import Links
from mpitrain.virtual.world import HEADER_BYTES

GBIT = 1e9 / 8  # bytes
SIZE = 1_000_000
LATENCY_S = 1e-3


class Payload(NamedTuple):
    num_bytes: int

    def statistics(self):
        return {}

    def release(self):
        pass


def arrivals(law, messages, **where):
    """[(seconds, source, number)] by receiver; `messages`: (source, to, bytes) all sent at time 0, in order of the
    senders' ranks."""
    ranks = range(1 + max(max(one[:2]) for one in messages))
    world = VirtualWorld(Constant(), law, **where)
    heard = {rank: [] for rank in ranks}

    def role(rank):
        for number, (source, to, num_bytes) in enumerate(messages):
            if source == rank:
                yield Send(to, Update(number, Payload(num_bytes - HEADER_BYTES)))
        for _ in range(sum(to == rank for _, to, _ in messages)):
            source, letter = yield Recv()
            heard[rank].append((world.now_s, source, letter.step))

    world.run({rank: role(rank) for rank in ranks})
    return heard


def cluster(**fields):
    defaults = {"gbit_per_s": 1.0, "latency_s": LATENCY_S, "local_gbit_per_s": 16.0, "local_latency_s": 1e-6}
    return Cluster(**(defaults | fields))


def test_a_cluster_of_one_rank_a_node_is_a_link_for_every_rank():
    links, same = Links(), Links()
    law, link = cluster(), Link(1.0, LATENCY_S)
    for now_s, source, to, num_bytes in [
        (0, 0, 1, 9),
        (0, 2, 1, 10**6),
        (0, 0, 2, 10**5),
        (1e-3, 1, 2, 500),
        (2, 0, 1, 7),
    ]:
        assert law.arrival_s(links, now_s, source, to, num_bytes) == pytest.approx(
            link.arrival_s(same, now_s, source, to, num_bytes), rel=1e-15
        )


@pytest.mark.parametrize("senders", [(1, 2, 3, 4), (4, 5, 6, 7)])
def test_senders_to_one_receiver_queue_at_its_adapter_whether_they_share_one_or_not(senders):
    """The k-th arrives at latency + k n / rate; those of one node queue at their own adapter, at the same rate."""
    law = cluster(ranks_per_node=4 if senders[0] == 4 else 1)
    heard = arrivals(law, [(one, 0, SIZE) for one in senders])[0]
    assert [source for _, source, _ in heard] == list(senders)
    assert [at_s for at_s, _, _ in heard] == pytest.approx(
        [LATENCY_S + k * SIZE / GBIT for k in (1, 2, 3, 4)], rel=1e-12
    )


def test_ranks_of_a_node_share_its_adapter_and_not_their_links_to_each_other():
    law = cluster(ranks_per_node=2)
    heard = arrivals(law, [(0, 2, SIZE), (1, 3, SIZE)])
    assert heard[2][0][0] == pytest.approx(LATENCY_S + SIZE / GBIT)
    assert heard[3][0][0] == pytest.approx(LATENCY_S + 2 * SIZE / GBIT)
    inside = arrivals(law, [(0, 1, SIZE), (2, 3, SIZE)])
    assert inside[1][0][0] == inside[3][0][0] == pytest.approx(1e-6 + SIZE / (16 * GBIT))


def test_a_device_that_is_slower_than_the_adapter_sets_the_pace_and_servers_have_none():
    law = cluster(device_gbit_per_s=0.5)
    slow_s, fast_s = 2 * SIZE / GBIT, SIZE / GBIT
    assert arrivals(law, [(0, 1, SIZE)])[1][0][0] == pytest.approx(LATENCY_S + slow_s)
    assert arrivals(law, [(0, 1, SIZE)], hosts=(0, 1))[1][0][0] == pytest.approx(LATENCY_S + fast_s)
    two = arrivals(law, [(1, 0, SIZE), (2, 0, SIZE)], hosts=(0,))[
        0
    ]  # two slow devices, side by side, fill an adapter
    assert two[-1][0] == pytest.approx(LATENCY_S + 2 * SIZE / GBIT)


@pytest.mark.parametrize("sharing", ["fcfs", "fair"])
def test_a_switch_that_is_oversubscribed_slows_only_what_passes_it(sharing):
    """Four nodes under each of two switches, 4 : 1: four messages across take four times as long."""
    law = cluster(nodes_per_switch=4, oversubscription=4.0, sharing=sharing)
    across = arrivals(law, [(rank, rank + 4, SIZE) for rank in range(4)])
    assert max(row[0][0] for rank, row in across.items() if rank >= 4) == pytest.approx(
        LATENCY_S + 4 * SIZE / GBIT
    )
    below = arrivals(law, [(0, 1, SIZE), (2, 3, SIZE)])
    assert below[1][0][0] == below[3][0][0] == pytest.approx(LATENCY_S + SIZE / GBIT)
    even = cluster(nodes_per_switch=4, sharing=sharing)
    across = arrivals(even, [(rank, rank + 4, SIZE) for rank in range(4)])
    last_s = max(row[0][0] for rank, row in across.items() if rank >= 4)
    # one behind the other a faster link serves each in a quarter of its time: only the last three wait for those before
    assert LATENCY_S + SIZE / GBIT * (1 - 1e-9) <= last_s <= LATENCY_S + 2 * SIZE / GBIT


def test_equal_messages_share_fairly_and_end_together():
    heard = arrivals(cluster(sharing="fair"), [(one, 0, SIZE) for one in (1, 2, 3, 4)])[0]
    assert len({at_s for at_s, _, _ in heard}) == 1
    assert heard[0][0] == pytest.approx(LATENCY_S + 4 * SIZE / GBIT, rel=1e-12)


def test_shares_grow_as_shorter_messages_end_and_the_rate_is_conserved():
    """n, 2n, 3n to one receiver: at thirds until 3n are through, at halves until 5n, then alone: 3, 5, 6."""
    heard = arrivals(cluster(sharing="fair"), [(one, 0, one * SIZE) for one in (1, 2, 3)])[0]
    assert [at_s for at_s, _, _ in heard] == pytest.approx(
        [LATENCY_S + k * SIZE / GBIT for k in (3, 5, 6)], rel=1e-12
    )


def test_shares_are_max_min_fair():
    """1 -> 0, 2 -> 0 and 2 -> 3 (twice the receivers' rate at node 2 would not help): halves, and the half that 2 -> 0
    leaves of node 2's adapter goes to 2 -> 3. A third sender to 0 leaves 2 -> 3 two thirds."""
    law = cluster(sharing="fair")
    heard = arrivals(law, [(1, 0, SIZE), (2, 0, SIZE), (2, 3, SIZE), (4, 0, SIZE)])
    assert [at_s for at_s, _, _ in heard[0]] == pytest.approx([LATENCY_S + 3 * SIZE / GBIT] * 3)
    assert heard[3][0][0] == pytest.approx(LATENCY_S + 1.5 * SIZE / GBIT)


@pytest.mark.parametrize("sharing", ["fcfs", "fair"])
def test_messages_of_a_pair_keep_their_order(sharing):
    law = cluster(
        ranks_per_node=2, device_gbit_per_s=0.3, nodes_per_switch=1, oversubscription=2.0, sharing=sharing
    )
    messages = [(0, 3, 10**6), (1, 3, 10**5), (0, 3, 200), (0, 3, 10**4), (2, 3, 300), (1, 3, 200)]
    heard = arrivals(law, messages)[3]
    assert len(heard) == len(messages) and [at_s for at_s, _, _ in heard] == sorted(
        at_s for at_s, _, _ in heard
    )
    for source in (0, 1):
        numbers = [number for _, one, number in heard if one == source]
        assert numbers == sorted(numbers)


def test_nodes_are_numbered_rank_by_rank_and_text_reads_back():
    assert cluster(ranks_per_node=3).nodes(7) == (0, 0, 0, 1, 1, 1, 2)
    law = parse(
        "cluster(ranks_per_node=2, sharing='fair', nodes_per_switch=2, oversubscription=3)", "network"
    )
    assert parse(str(law), "network") == law and law.shares_fairly
    for text in (
        "cluster(sharing='both')",
        "cluster(gbit_per_s=0)",
        "cluster(oversubscription=2)",
        "measured('none')",
    ):
        with pytest.raises(UsageError):
            parse(text, "network")


@pytest.mark.parametrize(
    ("name", "gbit_per_s"),
    [
        ("gbe1", 0.9456),
        ("gbe10", 10.0),
        ("gbe100", 100.0),
        ("hdr", 192.0),
        ("ndr", 400.0),
        ("slingshot", 200.0),
    ],
)
def test_a_preset_is_a_cluster_with_other_defaults(name, gbit_per_s):
    law = parse(f"{name}(ranks_per_node=2)", "network")
    assert (
        isinstance(law, Cluster) and str(law) == f"{name}(ranks_per_node=2)" and law.gbit_per_s == gbit_per_s
    )
    heard = arrivals(law, [(0, 2, SIZE)])[2]
    assert heard[0][0] == pytest.approx(law.latency_s + SIZE / (gbit_per_s * GBIT))


def test_measured_figures_make_a_cluster(tmp_path):
    def rows(*figures):
        return [{"a": 0, "b": 1, "latency_s": latency_s, "bytes_per_s": rate} for latency_s, rate in figures]

    found = {"nodes": [0, 0, 1, 1], "names": ["a", "a", "b", "b"]}
    found["between_nodes"] = rows((3e-6, 2 * GBIT), (1e-6, 3 * GBIT), (2e-6, GBIT))
    found["within_nodes"] = rows((1e-7, 50 * GBIT))
    path = tmp_path / "comm.json"
    path.write_text(json.dumps(found))
    law = MeasuredNetwork(str(path), sharing="fair")
    wanted = Cluster(2, 2.0, 2e-6, 50.0, 1e-7, sharing="fair")
    assert law.cluster == wanted
    messages = [(0, 1, SIZE), (0, 2, SIZE), (1, 2, SIZE)]
    assert arrivals(law, messages) == arrivals(wanted, messages)
    together = {"latency_s": 5e-6, "bytes_per_s": GBIT / 2}
    path.write_text(json.dumps(found | {"eager_bytes": 4096, "all_nodes_at_once": together}))
    wanted = Cluster(2, 2.0, 5e-6, 50.0, 1e-7, busy_gbit_per_s=0.5, eager_bytes=4096)
    assert MeasuredNetwork(str(path)).cluster == wanted
    path.write_text(json.dumps(found | {"all_nodes_at_once": {"latency_s": 1e-7, "bytes_per_s": 2 * GBIT}}))
    assert MeasuredNetwork(str(path)).cluster == Cluster(
        2, 2.0, 2e-6, 50.0, 1e-7
    )  # no slower together than alone
    path.write_text(json.dumps(found | {"between_nodes": [], "nodes": [0, 0]}))
    assert MeasuredNetwork(str(path)).nodes(50) == (0,) * 50
    with pytest.raises(UsageError, match="one node"):
        MeasuredNetwork(str(path), ranks_per_node=2)


@pytest.mark.parametrize("sharing", ["fcfs", "fair"])
def test_what_all_nodes_carry_at_once_slows_many_messages_and_not_one(sharing):
    law = cluster(busy_gbit_per_s=0.25, sharing=sharing)
    alone, *_ = arrivals(law, [(0, 1, SIZE), (2, 3, HEADER_BYTES)])[1]
    assert alone[0] == pytest.approx(
        LATENCY_S + SIZE / GBIT, rel=1e-3
    )  # four nodes carry what one adapter does
    ring = arrivals(law, [(rank, (rank + 1) % 4, SIZE) for rank in range(4)])
    last_s = max(row[0][0] for row in ring.values())
    assert last_s == pytest.approx(LATENCY_S + 4 * SIZE / GBIT)
    link = link_cost(law, 0, 1, num_nodes=4)
    assert link.alpha_s == LATENCY_S and link.beta_s == pytest.approx(4 / GBIT)
    assert link_cost(law, 0, 1).beta_s == pytest.approx(1 / GBIT)
