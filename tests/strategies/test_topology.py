"""Mixing matrices are doubly stochastic, whoever sends is heard, and the ring mixes at its spectral rate."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain import Decentralized, EightBit, TopK, simulate, train
from mpitrain.errors import UsageError
from mpitrain.job import Overrides
from mpitrain.planning.dry_run import check_roles
from mpitrain.simulation.timing import time_run
from mpitrain.simulation.workload import Workload
from mpitrain.strategies import topology
from mpitrain.training.session import assign_roles
from mpitrain.values import parse
from tests import toy

GRAPHS = st.tuples(
    st.sampled_from(topology.TOPOLOGIES), st.integers(1, 65), st.one_of(st.none(), st.integers(0, 40))
)


def matrix(name, number, step=None):
    w = torch.zeros(number, number, dtype=torch.float64)
    for rank in range(number):
        for other, weight in topology.mixing_weights(name, rank, number, step).items():
            w[rank, other] = weight
    return w


@settings(max_examples=80, deadline=None)
@given(GRAPHS)
def test_every_matrix_is_doubly_stochastic_and_who_is_sent_to_listens(graph):
    name, number, step = graph
    w = matrix(*graph)
    assert (w >= 0).all() and (w.diagonal() > 0).all()
    ones = torch.ones(number, dtype=torch.float64)
    torch.testing.assert_close(w.sum(0), ones, rtol=0, atol=1e-12)
    torch.testing.assert_close(w.sum(1), ones, rtol=0, atol=1e-12)
    if step is None or name != "exponential":
        torch.testing.assert_close(w, w.T)
        reached = torch.linalg.matrix_power((w > 0).double(), number)
        assert (reached > 0).all()  # everybody hears of everybody in the end
    for rank in range(number):
        for other in topology.receivers(name, rank, number, step):
            assert rank in topology.senders(name, other, number, step)
            assert other in topology.contacts(name, rank, number, step is None)
            assert rank in topology.contacts(name, other, number, step is None)
        for other in topology.senders(name, rank, number, step):
            assert rank in topology.receivers(name, other, number, step)


@pytest.mark.parametrize("name, degree", [("ring", 2), ("torus", 4), ("exponential", 1)])
def test_a_neighbour_costs_no_look_at_all_peers(name, degree):
    """Nobody could go through a million times a million peers."""
    number, rank = 10**12, 10**11 + 7
    assert (
        len(topology.receivers(name, rank, number, 3))
        == degree
        == len(topology.senders(name, rank, number, 3))
    )
    assert len(topology.contacts(name, rank, number, static=True)) <= 2 * number.bit_length() + 3


@pytest.mark.parametrize("number", [3, 5, 8, 12])
def test_the_ring_has_the_spectral_rate_that_is_stated(number):
    second = torch.linalg.eigvalsh(matrix("ring", number)).abs().sort().values[-2]
    assert float(second) == pytest.approx((1 + 2 * math.cos(2 * math.pi / number)) / 3)


@pytest.mark.parametrize("number", [2, 4, 16, 64])
def test_one_peer_exponential_is_the_exact_mean_after_log2_steps(number):
    product = torch.eye(number, dtype=torch.float64)
    for step in range(number.bit_length() - 1):
        product = matrix("exponential", number, step) @ product
    assert torch.equal(product, torch.full_like(product, 1 / number))


@given(st.integers(1, 200))
def test_the_tree_of_meetings_joins_everybody(number):
    for rank in range(number):
        parent = topology.parent(rank)
        assert (parent is None) == (rank == 0)
        assert parent is None or rank in topology.children(parent, number)


def test_where_copies_are_kept_the_graph_stands_still():
    assert not Decentralized("exponential").is_static
    assert Decentralized("exponential", codec=EightBit()).is_static
    assert Decentralized("exponential", asynchronous=True).is_static
    assert Decentralized("ring").is_static


@pytest.mark.parametrize(
    "text",
    ["decentralized()", "decentralized(topology='ring',codec=eightbit(),gamma=0.5)",
     "decentralized(codec=threshold(density=0.01),asynchronous=True,resync=100,warmup=warmup(workers=2,epochs=1))"],
)  # fmt: skip
def test_text_round_trips(text):
    assert parse(str(parse(text, "strategy")), "strategy") == parse(text, "strategy")


ASK_65 = {
    "mpi": lambda job: check_roles(job, Overrides(), (0,) * 65),
    "threads": lambda job: train(job, threads=65),
    "virtual": lambda job: simulate(job, workers=65),
    "timed": lambda job: simulate(job, workers=10_240, timing_only=True),
    "time_run": lambda job: time_run(job.strategy, Workload(10, 10_240, 1), 65),
    "loop": lambda job: assign_roles(SimpleNamespace(nodes=(0,) * 65), job.strategy, own_loop=True),
}


@pytest.mark.parametrize("world", ASK_65)
def test_more_than_64_that_tell_all_others_are_refused_before_anything_is_built(monkeypatch, world):
    def unasked(*args, **kwargs):
        raise AssertionError("built")

    for place in ("simulation.peers.PeerBuilder", "simulation.timing.VirtualWorld",
                  "training.in_threads.run.ThreadRun"):  # fmt: skip
        monkeypatch.setattr(f"mpitrain.{place}", unasked)
    job = toy.make_job(data=toy.Memory(10_240), strategy=Decentralized())
    with pytest.raises(UsageError, match="64 messages|10239 messages") as refused:
        ASK_65[world](job)
    for name in topology.TOPOLOGIES:
        assert f'"{name}"' in str(refused.value)


def test_whoever_writes_the_topology_out_or_has_few_workers_goes_on():
    Decentralized().check_workers(64)
    for name in topology.TOPOLOGIES:
        Decentralized(name).check_workers(10_240)
    insisted = parse("decentralized(topology='full')", "strategy")
    assert insisted != Decentralized() and parse(str(insisted), "strategy") == insisted
    assert [Decentralized(name).messages_to_workers(64) for name in topology.TOPOLOGIES] == [63, 2, 4, 1]


@pytest.mark.parametrize(
    "arguments",
    [{"topology": "star"}, {"resync": -1}, {"gamma": 0.5}, {"topology": "ring", "gamma": 1.5},
     {"topology": "ring", "codec": TopK(momentum=0.9)}],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(arguments):
    with pytest.raises(UsageError, match="decentralized|topology"):
        Decentralized(**arguments)
