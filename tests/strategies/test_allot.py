"""`allot` is the way back from `assign`: started where it says, every node has its workers and the servers theirs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.errors import UsageError
from mpitrain.strategies.placement import allot, assign


@given(
    st.integers(1, 12), st.integers(1, 8), st.integers(0, 30), st.sampled_from(["spread", "packed", "beside"])
)
def test_every_node_gets_its_workers(num_nodes: int, workers: int, num_servers: int, placement: str) -> None:
    if placement == "beside":
        num_servers -= num_servers % num_nodes
    nodes = allot(num_nodes, workers, num_servers, placement)
    assert list(nodes) == sorted(nodes) and len(nodes) == num_nodes * workers + num_servers
    roles = assign(nodes, num_servers, placement)
    at_work = [nodes[rank] for rank in roles.workers]
    if placement == "packed":  # it takes the lowest ranks, so the first nodes may only serve
        assert len(roles.workers) == num_nodes * workers
    else:
        assert all(at_work.count(node) == workers for node in range(num_nodes))
        served = [[nodes[rank] for rank in roles.servers].count(node) for node in range(num_nodes)]
        assert max(served) - min(served) <= 1


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 8), st.integers(0, 12))
def test_in_a_het_job_the_first_component_serves_and_only_that(
    server_nodes: int, worker_nodes: int, workers: int, more: int
) -> None:
    num_servers = server_nodes + more
    nodes = allot(server_nodes + worker_nodes, workers, num_servers, "spread", server_nodes)
    roles = assign(nodes, num_servers, "spread", server_nodes)
    assert roles.servers == tuple(range(num_servers))
    assert {nodes[rank] for rank in roles.servers} == set(range(server_nodes))
    at_work = [nodes[rank] for rank in roles.workers]
    assert all(at_work.count(node) == workers for node in range(server_nodes, server_nodes + worker_nodes))


def test_what_cannot_be_started_is_refused() -> None:
    with pytest.raises(UsageError, match="leave none for workers"):
        allot(2, 4, 2, "spread", num_server_nodes=2)
    with pytest.raises(UsageError, match="some without a rank"):
        allot(4, 4, 1, "spread", num_server_nodes=2)
    with pytest.raises(UsageError, match="do not come out even"):
        allot(2, 4, 3, "beside")
    with pytest.raises(UsageError, match=r"has 2 rank\(s\) for 1 server"):
        assign((0, 0, 1, 1), 1, "spread", num_server_nodes=1)
    with pytest.raises(UsageError, match="leave no worker"):
        allot(2, 0, 2)
