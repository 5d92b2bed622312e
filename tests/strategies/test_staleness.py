"""The staleness identity, for any order of joins, pushes, drops and departures."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.errors import UsageError
from mpitrain.strategies import Async
from mpitrain.strategies.base import Arrival, Verdict
from mpitrain.strategies.parameter_server.staleness import ShardCounts, disagreement
from mpitrain.strategies.placement import assign

EVENTS = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(["push", "push", "push", "drop", "bad", "gather", "leave"])),
    max_size=80,
)


def play(counts, events):
    for worker, what in events:
        if worker not in counts.reads:
            counts.read(worker, 8)
        elif what == "leave":
            counts.leave(worker)
        else:
            counts.push(worker, 3, 8, weight=0.0 if what == "drop" else 0.5, finite=what != "bad")
            if what == "push":
                counts.update()
            counts.read(worker, 8)


@given(EVENTS)
def test_both_sides_agree_after_every_event(events):
    counts = ShardCounts()
    for event in events:
        play(counts, [event])
        left, right = counts.identity()
        assert left == right


@given(EVENTS, st.integers(1, 3))
def test_the_tightest_read_is_the_least_of_all(events, uses):
    """By the definition, over all reads, with the one that a push would end and without."""
    counts = ShardCounts()

    def least(reads):
        return min((read - place for own in reads.values() for place, read in enumerate(own)), default=None)

    for worker, what in events:
        if worker in counts.reads:
            without = {**counts.reads, worker: counts.reads[worker][1:]}
            assert counts.tightest(worker) == least(without)
        else:
            counts.read(worker, 8, uses)
        play(counts, [(worker, what)])
        assert counts.tightest() == least(counts.reads)


@given(EVENTS, st.integers(0, 80))
def test_state_restores_everything(events, cut):
    counts, again = ShardCounts(), ShardCounts()
    play(counts, events[:cut])
    again.restore(json.loads(json.dumps(counts.state())))
    for each in (counts, again):
        play(each, events[cut:])
    assert again.summary() == counts.summary() and again.identity() == counts.identity()


def test_a_lost_gradient_breaks_the_identity():
    """The identity has teeth: forget one push and the sides differ."""
    counts = ShardCounts()
    for worker in range(3):
        counts.read(worker, 8)
    for worker in (0, 1, 0, 2):
        counts.push(worker, 1, 8, 1.0)
        counts.update()
        counts.read(worker, 8)
    counts.staleness[1] -= 1
    left, right = counts.identity()
    assert left != right


def test_async_applies_and_releases_the_pusher_alone():
    strategy = Async()
    verdict = strategy.on_push(
        strategy.start((1, 2)), Arrival(2, 0, read=3, version=9, now_s=0.0, blocked={2}, active={1, 2})
    )
    assert verdict == Verdict(1.0, True, (2,))


@pytest.mark.parametrize(
    ("nodes", "num_servers", "servers"),
    [
        ((0, 0, 0, 0), 1, (0,)),
        ((0,) * 5, 2, (0, 1)),
        ((0, 0, 1, 1), 0, ()),
        ((0, 0, 0, 1, 1, 1), 2, (2, 5)),
        ((0, 0, 0, 1, 1, 1), 1, (2,)),
        ((0, 1, 1, 1), 2, (2, 3)),
        ((0, 1, 0, 1), 2, (2, 3)),
    ],
)
def test_roles_are_a_function_of_the_node_map(nodes, num_servers, servers):
    roles = assign(nodes, num_servers)
    assert roles.servers == servers
    assert sorted(roles.servers + roles.workers) == list(range(len(nodes)))
    assert roles.validator == min(roles.workers)


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(1, 6))
def test_placements_keep_their_word(sizes, num_servers):
    nodes = tuple(node for node, size in enumerate(sizes) for _ in range(size))
    if num_servers >= len(nodes):
        return
    assert assign(nodes, num_servers, "packed").servers == tuple(range(num_servers))
    if num_servers % len(sizes):
        with pytest.raises(UsageError, match="do not come out even"):
            assign(nodes, num_servers, "beside")
    elif min(sizes) >= num_servers // len(sizes):
        beside = [nodes[rank] for rank in assign(nodes, num_servers, "beside").servers]
        assert {beside.count(node) for node in range(len(sizes))} == {num_servers // len(sizes)}


def test_two_servers_on_two_nodes():
    nodes = (0, 0, 0, 1, 1, 1)
    assert assign(nodes, 2, "packed").servers == (0, 1) and assign(nodes, 2, "beside").servers == (2, 5)


@pytest.mark.parametrize("num_servers", [2, 3])
def test_no_worker_left_is_refused(num_servers):
    with pytest.raises(UsageError, match="start at least"):
        assign((0, 0), num_servers)


@given(num_nodes=st.integers(2, 4), size=st.integers(1, 4), servers=st.integers(1, 15))
def test_servers_are_spread_evenly_over_nodes_of_equal_size(num_nodes, size, servers):
    nodes = tuple(node for node in range(num_nodes) for _ in range(size))
    num_servers = min(servers, len(nodes) - 1)
    workers = assign(nodes, num_servers).workers
    left = [sum(nodes[rank] == node for rank in workers) for node in range(num_nodes)]
    assert max(left) - min(left) <= 1 and sum(left) == len(nodes) - num_servers


def test_versions_that_nobody_read_are_counted_as_versions():
    """Every gradient is accepted; worker 0 never saw versions 1, 2 and 3."""
    counts = ShardCounts()
    for worker in (0, 1):
        counts.read(worker, 8)
    for worker in (1, 1, 1, 0):
        counts.push(worker, 1, 8, 1.0)
        counts.update()
        counts.read(worker, 8)
    summary = counts.summary()
    assert (summary["accepted"], summary["versions_skipped"]) == (4, 3) and "skipped" not in summary


@pytest.mark.parametrize(
    ("weight", "finite", "late", "fate"),
    [
        (0.5, True, False, "accepted"),
        (0.0, True, False, "dropped"),
        (0.0, True, True, "late"),
        (0.0, False, False, "nonfinite"),
        (0.0, False, True, "nonfinite"),
        (0.5, False, False, "nonfinite"),
    ],
)
def test_every_push_has_one_fate_and_its_samples_are_counted_there(weight, finite, late, fate):
    counts = ShardCounts()
    counts.read(1, 8)
    counts.push(1, 3, 8, weight, finite, late)
    told = counts.summary()
    assert {one: told[one] for one in ("accepted", "dropped", "late", "nonfinite")} == {
        one: int(one == fate) for one in ("accepted", "dropped", "late", "nonfinite")
    }
    accepted = 3 * (fate == "accepted")
    assert (told["samples_accepted"], told["samples_dropped"]) == (accepted, 3 - accepted)


def shard(accepted, dropped_samples=0, **fates):
    return {
        "samples_accepted": accepted, "samples_dropped": dropped_samples, "late": 0, "dropped": 0, "nonfinite": 0,
        **fates,
    }  # fmt: skip


def test_shards_disagree_where_what_they_have_accepted_differs_and_nothing_was_discarded():
    assert disagreement([shard(12), shard(12)]) == ""
    assert "shard 1 has accepted 9" in disagreement([shard(12), shard(9)])
    assert disagreement([shard(12), shard(9, 3)]), "discarded samples, and no push that was"


@pytest.mark.parametrize("fate", ["late", "dropped", "nonfinite"])
def test_where_pushes_are_discarded_shards_agree_on_all_that_they_have_judged(fate):
    """Each by versions of its own, so on other pushes."""
    assert disagreement([shard(12), shard(9, 3, **{fate: 1})]) == ""
    assert disagreement([shard(9, 3, **{fate: 1}), shard(6, 6, **{fate: 2})]) == ""
    assert "discarded 2" in disagreement([shard(12), shard(9, 2, **{fate: 1})])
