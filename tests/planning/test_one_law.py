"""A plan's closed forms and a simulation's events are one law of messages: where there is a theorem they agree, below
the eager limit, at it, and beyond."""

import pytest

from mpitrain.planning.scaling import Conditions, Setting, Times, throughput
from mpitrain.simulation.timing import time_run
from mpitrain.simulation.workload import Workload
from mpitrain.values import parse
from mpitrain.virtual.compute import Constant
from mpitrain.virtual.link_costs import link_cost
from mpitrain.virtual.message_law import ENVELOPE_BYTES, LinkCost
from mpitrain.virtual.network import Cluster

LIMIT, BATCH, STEPS = 65536, 32, 12
# payload bytes: far below the limit, the last that is sent at once, the first that waits, and far beyond
SIZES = (
    4096,
    LIMIT - ENVELOPE_BYTES - 32,
    LIMIT - ENVELOPE_BYTES + 32,
    1 << 20,
)  # multiples of 64, as on the wire
KINDS = {"async()": "async", "sync()": "servers", "localsgd(period=1)": "localsgd"}


def cluster(sharing="fcfs", **changes):
    return Cluster(gbit_per_s=1.0, latency_s=5e-5, eager_bytes=LIMIT, sharing=sharing, **changes)


def simulated_s(text, law, num_workers, num_bytes, batch_s):
    """Seconds a batch of a worker, begin and end of the run apart."""

    def run_s(steps):
        load = Workload(num_bytes // 4, steps * num_workers * BATCH, BATCH)
        found = time_run(parse(text, "strategy"), load, num_workers, Constant(batch_s, 0.0), law)
        return found["virtual_s"]

    return (run_s(2 * STEPS) - run_s(STEPS)) / STEPS


def planned_s(text, law, num_workers, num_bytes, batch_s):
    together = link_cost(law, 0, 1, num_nodes=2)
    given = Conditions(
        Times(Constant(batch_s, 0.0)), BATCH, num_bytes, LinkCost(), link_cost(law), together, network=law
    )
    setting = Setting(text, KINDS[text], servers=1)
    return num_workers * BATCH / throughput(setting, given, num_workers)


@pytest.mark.parametrize("sharing", ["fcfs", "fair"])
@pytest.mark.parametrize("num_bytes", SIZES)
@pytest.mark.parametrize("text", ["async()", "sync()"])
def test_one_worker_takes_its_batch_and_two_transfers(text, num_bytes, sharing):
    law = cluster(sharing)
    expected = simulated_s(text, law, 1, num_bytes, 0.1)
    assert planned_s(text, law, 1, num_bytes, 0.1) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("num_bytes", SIZES)
def test_workers_that_compute_for_long_do_not_meet_at_the_server(num_bytes):
    expected = simulated_s("async()", cluster(), 4, num_bytes, 1.0)
    assert planned_s("async()", cluster(), 4, num_bytes, 1.0) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("text", "sharing"), [("async()", "fcfs"), ("sync()", "fcfs"), ("sync()", "fair")])
@pytest.mark.parametrize("num_bytes", [*SIZES[1:], 1 << 22])
def test_a_servers_link_is_what_many_workers_wait_for(text, num_bytes, sharing):
    """Of 16 that wait for nobody a direction has work for 16 of 17 parts of the time, by the formula. On links that are
    shared fairly their times must vary, or all of them push at once, and wait for the replies at once."""
    law, batch_s = cluster(sharing), 1e-4
    expected = simulated_s(text, law, 16, num_bytes, batch_s)
    assert planned_s(text, law, 16, num_bytes, batch_s) == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize("busy", [0.0, 0.4])
@pytest.mark.parametrize("num_bytes", [*SIZES, 4 * LIMIT, 4 * LIMIT + 16])
def test_an_averaging_round_costs_its_allreduce_in_both(num_bytes, busy):
    law = cluster(busy_gbit_per_s=busy)
    expected = simulated_s("localsgd(period=1)", law, 4, num_bytes, 0.1)
    assert planned_s("localsgd(period=1)", law, 4, num_bytes, 0.1) == pytest.approx(expected, rel=1e-9)
