"""Which ranks aggregate, and what does not go with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.job import Overrides
from mpitrain.job.asked import check
from mpitrain.messages import Lease
from mpitrain.planning.plan import setting_of
from mpitrain.strategies.features import LOOP, MPI, THREADS, why_not
from mpitrain.strategies.parameter_server.processed import ProcessedSamples
from mpitrain.strategies.placement import allot, assign, assign_workers
from mpitrain.training.fault_tolerance import check_aggregated, survives
from mpitrain.training.parameter_server.run import check_sums
from mpitrain.training.validate import validate_run
from mpitrain.values import parse
from tests import toy


@given(
    st.integers(1, 8), st.integers(2, 8), st.integers(1, 12), st.sampled_from(["spread", "packed", "beside"])
)
def test_every_node_gets_its_workers_and_one_aggregator(
    num_nodes: int, workers: int, num_servers: int, placement: str
) -> None:
    if placement == "beside":
        num_servers = num_nodes
    nodes = allot(num_nodes, workers, num_servers, placement, aggregates=True)
    roles = assign(nodes, num_servers, placement, aggregates=True)
    assert sorted((*roles.servers, *roles.workers, *roles.aggregators)) == list(range(len(nodes)))
    assert len(nodes) == num_nodes * (workers + 1) + num_servers
    if placement != "packed":  # it takes the lowest ranks, so the first nodes may only serve
        assert [nodes[rank] for rank in roles.aggregators] == list(range(num_nodes))
        assert [len(group) for group in roles.members] == [workers] * num_nodes
    for aggregator, group in zip(roles.aggregators, roles.members, strict=True):
        assert {nodes[rank] for rank in group} == {nodes[aggregator]} and aggregator > max(group)


def test_a_node_of_fewer_workers_has_none_and_they_send_directly() -> None:
    roles = assign((0, 0, 0, 0, 1, 1, 2), 1, "packed", aggregates=True)
    assert roles == ((0,), (1, 2, 4, 5, 6), (3,), ((1, 2),))
    assert roles.routes(0) == {1: 3, 2: 3} and roles.routes(1) == {0: 3} and roles.routes(4) == {}
    assert [roles.of(rank) for rank in (0, 1, 3, 4)] == ["server", "worker", "aggregator", "worker"]


def test_in_a_het_job_the_servers_component_has_none() -> None:
    nodes = allot(3, 2, 4, "spread", num_server_nodes=1, aggregates=True)
    roles = assign(nodes, 4, "spread", 1, aggregates=True)
    assert roles.servers == (0, 1, 2, 3) and roles.aggregators == (6, 9)


def test_without_two_workers_on_a_node_there_is_nothing_to_aggregate() -> None:
    for nodes in ((0, 0, 0), (0, 0, 1, 1)):
        with pytest.raises(UsageError, match="no node has 3 ranks besides servers"):
            assign(nodes, 1, "packed", aggregates=True)


@given(st.integers(2, 40), st.integers(1, 3), st.integers(4, 9))
def test_a_number_of_workers_is_a_number_of_ranks(workers: int, servers: int, per_node: int) -> None:
    def nodes_of(size: int) -> tuple[int, ...]:
        return tuple(rank // per_node for rank in range(size))

    try:
        roles, nodes = assign_workers(workers, nodes_of, servers, aggregates=True)
    except UsageError as error:
        assert "no node has 3" in str(error)
        return
    assert len(roles.workers) == workers and roles == assign(nodes, servers, aggregates=True)


@pytest.mark.parametrize("text", ["sync", "async", "softsync", "ssp"])
def test_it_is_part_of_the_text(text: str) -> None:
    strategy = parse(f"{text}(aggregate='node')", "strategy")
    assert parse(str(strategy), "strategy") == strategy
    assert eval(repr(strategy), {type(strategy).__name__: type(strategy)}) == strategy
    assert strategy.family == parse(text, "strategy").family  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "text, reason",
    [
        ("sync(aggregate='rack')", "unknown aggregate 'rack'"),
        ("backup(aggregate='node')", 'aggregate="node" is for sync, async, softsync and ssp'),
        ("bounded(aggregate='node')", 'aggregate="node" is for sync, async, softsync and ssp'),
        ("elastic(aggregate='node')", 'aggregate="node" is for sync, async, softsync and ssp'),
        ("hybrid(aggregate='node')", 'aggregate="node" is for sync, async, softsync and ssp'),
        (
            "sync(aggregate='node',push_wire='float16')",
            "push_wire=float16 does not go with .* in full numbers",
        ),
        (
            "sync(aggregate='node',push_wire=topk())",
            r"push_wire=topk\(.*\) does not go with .* in full numbers",
        ),
        ("sync(aggregate='node',damping=gap_aware())", "damping=.* cannot be corrected gradient by gradient"),
        (
            "sync(aggregate='node',optimizer='worker')",
            "optimizer=worker does not go with .* not finished updates",
        ),
        ("sync(aggregate='node',push_every=2)", "push_every=2 does not go with .* single batches"),
        ("sync(aggregate='node',warmup=warmup(epochs=1))", "warmup=.* does not go with .* from the start"),
        ("sync(aggregate='node',batching=by_speed())", "batching=.* does not go with .* samples alone"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        parse(text, "strategy")


def test_what_is_passed_on_as_it_is_may_be_anything() -> None:
    for text in (
        "async(aggregate='node',push_wire=topk(),damping=delay_compensated())",
        "softsync(aggregate='node',updates=3,blocking=True,warmup=warmup(epochs=1))",
        "ssp(aggregate='node',push_every=2,batching=by_speed())",
        "async(aggregate='node',inflight=2,reply_wire='float16')",
        "sync(aggregate='node',reply_wire=topk(),batching=per_round())",
    ):
        assert parse(text, "strategy")


def test_whoever_asks_for_tables_or_brings_a_loop_is_told_why_not() -> None:
    strategy = mt.Async(aggregate="node")
    assert "rows of tables are asked for by each worker" in why_not("sparse", strategy, MPI)
    assert why_not("served", strategy, MPI) == why_not("sparse", strategy, MPI)
    assert "only `train` starts" in why_not("own loop", strategy, LOOP)


def session_on(runtime: object = None, **fields: object) -> Any:
    return SimpleNamespace(runtime=runtime, strategy=mt.Sync(aggregate="node"), **fields)


@pytest.mark.parametrize("level", ["ulfm", "heartbeat"])
def test_a_launch_that_is_to_survive_a_death_is_refused(level: str) -> None:
    runtime: Any = SimpleNamespace(fault_tolerance=level)
    with pytest.raises(UsageError, match=rf"--ft {level} .* wait for one another, and for their aggregator"):
        check_aggregated(runtime, mt.Async(aggregate="node"))
    assert not survives(runtime, mt.Async(aggregate="node"))
    check_aggregated(runtime, mt.Async())
    runtime.fault_tolerance = "none"
    check_aggregated(runtime, mt.Async(aggregate="node"))


def test_silence_is_waited_out_by_nobody() -> None:
    job = toy.make_job(strategy=mt.Async(aggregate="node"))
    with pytest.raises(UsageError, match="--heartbeat-s is how long .* cannot go on without one"):
        validate_run(job, Overrides(heartbeat_s=9.0), 2)


def test_threads_and_plans_do_not_take_it() -> None:
    job = toy.make_job(strategy=mt.Async(aggregate="node"))
    with pytest.raises(UsageError, match="between threads no message travels"):
        check(job, Overrides(), THREADS, 3)
    runs: Any = SimpleNamespace(touches_rows=False)
    with pytest.raises(UsageError, match="knows of no aggregators"):
        setting_of("sync(aggregate='node')", None, cast("Any", None), runs)


def test_shards_that_were_cut_at_different_pushes_go_on_without_sums() -> None:
    def state(*leases: Lease) -> dict[str, Any]:
        processed = ProcessedSamples(48)
        for lease in leases:
            processed.add(lease)
        return {"processed": processed.state(), "pieces": []}

    first, second = Lease(0, 0, 4), Lease(0, 4, 4)
    catalogue = SimpleNamespace(num_samples=48)
    same = SimpleNamespace(folder="there", servers=lambda: [state(first, second), state(second, first)])
    check_sums(session_on(resume=same, catalogue=catalogue))
    differ = SimpleNamespace(folder="there", servers=lambda: [state(first, second), state(first)])
    with pytest.raises(UsageError, match="there: its shards were cut at different pushes"):
        check_sums(session_on(resume=differ, catalogue=catalogue))
