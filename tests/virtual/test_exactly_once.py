"""Every shard processes every push exactly once, whatever dies, is told to end or is started again between two shards.

A store counts how often each sample was added to it, which does not depend on what its server counts. Workers are
killed before every message that they send, so also between a push to one shard and the same push to the next; a run is
told to end at every moment, and one that is killed goes on from every checkpoint that it has completed.
"""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.strategies import Warmup
from tests.sampling import sampled
from tests.virtual.course import on_servers
from tests.virtual.legs import COURSE, EPOCHS, SAMPLES, WORKERS, check, run

SEVERAL = sorted(row for row in COURSE if on_servers(COURSE[row](WORKERS), 2, WORKERS).servers == 2)
SAMPLE = sorted(COURSE)[::3]  # what `make test` runs of them


@pytest.mark.parametrize("row", sampled(SEVERAL, SAMPLE))
def test_a_worker_killed_before_any_of_its_messages_leaves_no_push_half_judged(row):
    for servers in (2, 3):
        strategy = on_servers(COURSE[row](WORKERS), servers, WORKERS)
        for index in (0, 2):
            at, died = 0, True
            while died:
                ended = run(strategy, kills=((index, at),), seed=at)
                check(row, ended)
                at, died = at + 1, ended.died()
            assert at > 5 * servers


@pytest.mark.parametrize("row", sampled(sorted(COURSE), SAMPLE))
def test_a_run_told_to_end_at_any_moment_goes_on_where_no_shard_has_judged(row):
    for servers in (1, 2, 3):
        strategy = on_servers(COURSE[row](WORKERS), servers, WORKERS)
        for moment in range(1, 16, 2):
            ended = run(strategy, ends_s=0.7 * moment, seed=moment)
            parts = ended.disk.complete(strategy.servers)
            check(row, run(strategy, resume=parts[-1] if parts else None, seed=moment + 1))


@pytest.mark.parametrize("row", sampled(SEVERAL, SAMPLE))
def test_a_run_that_is_told_to_end_right_after_its_restart_writes_all_parts_again(row):
    """Also where the others had been cut at later pushes than the dealing server."""
    ahead = 0
    for servers in (2, 3):
        strategy = on_servers(COURSE[row](WORKERS), servers, WORKERS)
        for moment in range(2, 10, 3):
            complete = run(strategy, ends_s=0.9 * moment, seed=moment).disk.complete(servers)
            parts = [json.loads(complete[-1][shard][0]) for shard in range(servers)]
            counts = [part["ledger"]["samples_accepted"] for part in parts]
            ahead += max(counts) > counts[0]
            again = run(strategy, resume=complete[-1], ends_s=0.0, seed=moment)
            assert again.disk.complete(servers) and all(server.checkpoints.ended for server in again.servers)
    assert ahead or any(word in row for word in ("sync", "backup", "elastic", "bounded, rounds"))


@pytest.mark.parametrize("row", sampled(sorted(COURSE), SAMPLE))
def test_a_killed_run_goes_on_from_any_of_its_checkpoints(row):
    """With as many workers or with others, and after the death of a worker."""
    for servers in (1, 2, 3):
        strategy = on_servers(COURSE[row](WORKERS), servers, WORKERS)
        ended = run(strategy, every=3, seed=servers, kills=((1, 4 + 3 * servers),) * (servers > 1))
        assert len(ended.disk.complete(strategy.servers)) >= 2
        for number, parts in enumerate(ended.disk.complete(strategy.servers)):
            workers = WORKERS if "all" in row or number % 2 else WORKERS + 1
            check(row, run(strategy, workers, resume=parts, seed=number))


@pytest.mark.parametrize(
    "row", sampled([row for row in SEVERAL if not any(word in row for word in ("pu", "elastic"))], SAMPLE)
)
def test_who_is_given_up_by_one_server_and_not_by_another_leaves_no_push_half_judged(row):
    """Servers that exchange norms all do as the dealing one does."""
    together = "clipped" in row
    strategy = on_servers(COURSE[row](WORKERS), 2, WORKERS)
    given_up = 0
    for patient in (0, 1):
        for at in range(2, 24, 3):
            for index in (0, 1):  # the first one delivers, if the dealing server has not given it up
                ended = run(strategy, naps=((index, at),), patient=(patient,), seed=at)
                check(row, ended)
                given_up += len(ended.servers[1 - patient].table.lost)
                lost = ended.servers[0 if together else 1 - patient].table.lost
                assert ended.servers[patient].table.lost == (lost if together else {})
                dealing = ended.servers[0]
                living = [i for i, rank in enumerate(dealing.workers) if rank not in dealing.table.lost]
                assert dealing.delivered == {"by": living[0]}
    assert given_up > (2 if together else 4)


def test_a_run_that_no_worker_is_left_to_finish_says_so():
    """Each of them is given up by some server, although none has given up all."""
    strategy, ends = on_servers(COURSE["sync"](WORKERS), 3, WORKERS), []
    for at in range(6, 14, 2):
        for other in range(4, 12, 3):
            ended = run(strategy, naps=((2, at), (0, other)), patient=(2,), seed=154)
            failure = ended.servers[0].summary()["failure"]
            ends.append(bool(failure))
            if failure:
                assert failure.startswith("no worker is left, and not all batches are done")
            else:
                check("sync", ended)
    assert True in ends and False in ends


@pytest.mark.parametrize("row", ["async", "sync", "bounded, pushes of two, drop", "sync, clipped"])
def test_a_warm_up_whose_only_worker_dies_is_over(row):
    """All others take over, at the version that all servers have then come to."""
    for servers in (1, 3):
        strategy = replace(on_servers(COURSE[row](WORKERS), servers, WORKERS), warmup=Warmup(1, 1.0))
        at, died = 0, True
        while died:
            ended = run(strategy, kills=((0, at),), seed=at, most_s=0.0)
            check(row, ended)
            assert all(replica.pushed for replica in ended.replicas[1:])
            at, died = at + 1, ended.died()
        assert at > 10 * servers


@pytest.mark.parametrize("servers", [1, 2])
def test_one_that_finds_all_batches_dealt_stays_for_those_that_hold_them(servers):
    strategy = on_servers(COURSE["async"](3), servers, 3)
    ended = run(strategy, 3, kills=((0, servers), (1, servers)), batches=2)
    assert ended.died() and ended.servers[0].summary()["failure"] == ""
    assert ended.servers[0].processed.num_samples() == 2


@settings(max_examples=60, deadline=None)
@given(
    row=st.sampled_from(sorted(COURSE)),
    servers=st.integers(1, 3),
    limits=st.sampled_from([(1, None, False), (2, None, True), (2, 7, False), (3, None, False)]),
    starts=st.lists(
        st.tuples(
            st.integers(2, 4),
            st.floats(0.5, 8.0),
            st.none() | st.tuples(st.integers(0, 1), st.integers(0, 30)),
        ),
        max_size=3,
    ),
    seed=st.integers(0, 99),
)
def test_stopped_killed_and_started_again_with_others_all_shards_agree(row, servers, limits, starts, seed):
    """However often, with other numbers of workers, in larger batches, up to a number of batches, and without the last
    incomplete batch."""
    batch, batches, drop_last = limits
    strategy, parts = on_servers(COURSE[row](2), servers, 2), None
    sizes = {"batch": batch, "batches": batches, "drop_last": drop_last}
    for workers, ends_s, kill in starts:
        kills = () if kill is None or strategy.servers == 1 else (kill,)
        workers = 2 if "blocking" in row else workers  # shards that wait for some of many are refused
        ended = run(strategy, workers, kills, parts, 3, ends_s, seed, **sizes)
        complete = ended.disk.complete(strategy.servers)
        parts = complete[seed % len(complete)] if complete else parts
    ended = run(strategy, 2, resume=parts, seed=seed, **sizes)
    whole = EPOCHS * SAMPLES - ended.servers[0].leases.num_left_out()
    if batches is not None:
        whole = ended.servers[0].processed.num_samples()
        assert ended.servers[0].leases.dealer.num_dealt == batches
    check(row, ended, whole)
    assert all(server.processed == ended.servers[0].processed for server in ended.servers)
