"""Checkpoints that loops ask for, in virtual time: whatever the strategy, however many steps each worker has taken when
it asks, and whoever dies, all shards are cut at the same pushes and nobody waits for ever.
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain import strategies
from mpitrain.effects import Compute
from mpitrain.errors import UsageError
from mpitrain.inject import Kill, Straggler
from mpitrain.messages import Lease
from mpitrain.reporting.report import NullReport
from mpitrain.roles import Rhythm, SaveRequest, SavingServer, Worker
from mpitrain.strategies import Elastic
from mpitrain.strategies.placement import assign
from mpitrain.virtual import Constant, Ideal, VirtualWorld
from tests.virtual.course import COURSE, on_servers
from tests.virtual.worlds import NumberReplica, NumberStore, Shuffled, by_batch

WORKERS = 3
ROWS = sorted(
    row for row in COURSE if "abort" not in row
)  # which stops gradients: of a loop of its own nobody can


class Loop(NumberReplica):
    """A loop of so many batches."""

    def __init__(self, strategy, num_batches):
        super().__init__(strategy, 0.25, by_batch, frozenset())
        self.num_batches = num_batches

    def gradient(self, lease, step):
        return super().gradient(Lease(0, step, 1), step) if step < self.num_batches else None


def asking(role, after, order):
    """The role of a loop that asks for a checkpoint after so many gradients."""
    answer, count = None, 0
    while True:
        try:
            effect = role.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(effect, Compute) and effect.what == "gradient":
            count += 1
            if count == after + 1:
                answer = order
                continue
        answer = yield effect


def run(strategy, steps, orders, network=Ideal(), faults=(), seed=0):  # noqa: B008 - frozen
    roles, written = assign((0,) * (strategy.servers + WORKERS), strategy.servers), {}
    world = VirtualWorld(Constant(1.0, 0.3), network, seed, roles.workers)
    processes = {}

    def server(shard):
        def write(order, state, workers):
            assert shard not in written, "written twice"
            written[shard] = (order, state["num_batches"], workers, store.value)

        share = strategy.share(WORKERS) if isinstance(strategy, Elastic) else None
        store = NumberStore(1.0 if strategy.optimizer == "worker" else 0.25, share=share)
        return SavingServer(strategy, store, roles.workers, NullReport(), write=write).run()

    for shard in roles.servers:
        processes[shard] = server(shard)
    for index, rank in enumerate(roles.workers):
        worker = Worker(rank, roles, Loop(strategy, 12), NullReport(), Rhythm.of(strategy, leased=False))
        asks = asking(worker.run(), steps[index], orders[index])
        processes[rank] = Straggler(faults, index, seed).wrap(asks)
    return roles, world.run(processes), written


@settings(max_examples=150, deadline=None)
@given(
    row=st.sampled_from(ROWS),
    servers=st.integers(1, 3),
    steps=st.lists(st.integers(1, 11), min_size=WORKERS, max_size=WORKERS),
    seed=st.integers(0, 9),
    shuffled=st.booleans(),
    kill=st.none() | st.tuples(st.integers(0, WORKERS - 1), st.integers(0, 11)),
)
def test_all_shards_are_cut_at_the_same_pushes(row, servers, steps, seed, shuffled, kill):
    strategy, order = on_servers(COURSE[row](WORKERS), servers, WORKERS), SaveRequest(7, "there")
    faults = () if kill is None else (Kill(*kill),)
    network = Shuffled(seed, 0.5) if shuffled else Ideal()
    roles, returned, written = run(strategy, steps, [order] * WORKERS, network, faults, seed)
    assert sorted(written) == sorted(roles.servers)
    dead = {rank for rank in roles.workers if returned[rank].get("broken")}
    for given_order, pushed, workers, _ in written.values():
        assert given_order == order and set(workers) >= set(roles.workers) - dead
        for rank, step in zip(roles.workers, steps):
            assert rank in dead or pushed[str(rank)] == step
    for shard in roles.servers:
        left, right = returned[shard]["staleness_identity"]
        assert left == right and returned[shard]["failure"] == ""
    if not dead:
        assert all(Counter(counts[1]) == Counter(written[0][1]) for counts in written.values())


def test_different_checkpoints_at_once_are_refused():
    with pytest.raises(UsageError, match="rank 1 at 7, rank 2 at 8"):
        run(strategies.Async(), (3, 3, 3), (SaveRequest(7, ""), SaveRequest(8, ""), SaveRequest(7, "")))
