"""Timing only: the same virtual time and counts as with gradients, the same bytes twice, and the closed forms."""

import json
import subprocess
import sys

import pytest

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.simulation.timing import Workload, time_run
from mpitrain.strategies import Async, Backup, Sync
from mpitrain.values import parse
from mpitrain.virtual import Cluster, Constant, Exponential, Link, ShiftedExponential
from tests import toy

ALIKE = [
    "async()",
    "async(servers=3)",
    "async(push_every=2)",
    "async(inflight=2)",
    'async(push_wire="float16")',
    "async(damping=drop(limit=2))",
    "sync()",
    "sync(servers=2)",
    "backup(spare=1)",
    'backup(spare=1, stragglers="abort")',
    "softsync(updates=2)",
    "ssp(bound=1)",
    "bounded(staleness=2)",
    "elastic()",
    "decentralized()",
    'decentralized(topology="ring", resync=3)',
    "decentralized(asynchronous=True)",
    "localsgd(period=3)",
    "localsgd(period=2, start=4)",
]
COUNTS = ["accepted", "late", "dropped", "versions_skipped", "samples", "pushed_bytes", "replied_bytes",
          "staleness_histogram", "staleness_identity", "samples_left_out", "steps", "averagings"]  # fmt: skip


@pytest.mark.parametrize("eager_bytes", [0, 200])
@pytest.mark.parametrize("strategy", ALIKE)
def test_a_run_takes_the_time_of_the_one_with_gradients_and_counts_the_same(tmp_path, strategy, eager_bytes):
    compute = ShiftedExponential(0.5, 1.0)
    network = Cluster(gbit_per_s=1e-4, latency_s=0.01, eager_bytes=eager_bytes)
    job = toy.make_job(data=toy.Memory(100), batch_size=4, epochs=2, strategy=parse(strategy, "strategy"))
    job_alone = toy.make_job(data=toy.Memory(100), batch_size=4, epochs=2, validate=None)
    seen = mt.simulate(job, workers=4, compute=compute, network=network, run_dir=str(tmp_path), quiet=True)
    timed = time_run(parse(strategy, "strategy"), Workload.of(job_alone), 4, compute, network, job.seed)
    assert timed["virtual_s"] == seen["virtual_s"]
    assert {key: timed[key] for key in COUNTS if key in timed and key in seen} == {
        key: seen[key] for key in COUNTS if key in timed and key in seen
    }


@pytest.mark.parametrize(
    "text", ['decentralized(topology="ring", resync=3)', "async(servers=2)", "localsgd(period=3)"]
)
def test_a_model_in_16_bits_takes_the_time_of_what_travels_of_it(tmp_path, text):
    """Peers meet over their masters, in 32 bits."""
    network, strategy = Cluster(gbit_per_s=1e-4, latency_s=0.01, eager_bytes=0), parse(text, "strategy")
    fields = {"data": toy.Memory(40), "batch_size": 4, "epochs": 1, **toy.LINEAR_BFLOAT16}
    job = toy.make_job(strategy=strategy, **fields)
    seen = mt.simulate(job, workers=4, network=network, run_dir=str(tmp_path), quiet=True)
    timed = time_run(strategy, Workload.of(toy.make_job(**fields)), 4, Constant(1.0), network, job.seed)
    assert timed["virtual_s"] == seen["virtual_s"]


LOAD = Workload(num_parameters=1000, num_samples=4000, step_samples=2, steps=40)


@pytest.mark.parametrize("strategy", ["async(servers=2)", "decentralized()", "localsgd(period=4)"])
def test_the_same_seed_gives_the_same_bytes_and_another_one_others(strategy):
    rows = [
        json.dumps(time_run(parse(strategy, "strategy"), LOAD, 6, Exponential(), Link(), seed))
        for seed in (1, 1, 2)
    ]
    assert rows[0] == rows[1] != rows[2]


def test_a_worker_takes_the_same_times_whatever_the_strategy_and_the_number_of_servers():
    """Nobody waits in these, so a worker's seconds of computing are the sum of its draws."""
    found = [
        [row["compute_s"] for row in time_run(one, LOAD, 4, Exponential())["per_worker"]]
        for one in (Sync(), Sync(servers=3), Sync(servers=2))
    ]
    assert found[1] == pytest.approx(found[0])
    assert found[2] == pytest.approx(found[0])


def test_torch_is_not_imported():
    program = "import sys, mpitrain.simulation.timing; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_staleness_is_one_less_than_the_number_of_workers():
    found = time_run(Async(), Workload(100, 10**6, 1, steps=300), 16, Exponential())
    assert found["staleness_mean"] == pytest.approx(15, rel=0.02)
    assert found["staleness_identity"][0] == found["staleness_identity"][1]


def test_a_step_lasts_until_the_kth_of_n():
    """1 + H_n - H_(n-k), to one per cent."""
    number, accepted = 100, 96
    found = time_run(
        Backup(spare=number - accepted, stragglers="abort"),
        Workload(100, 10**6, 1, steps=400),
        number,
        ShiftedExponential(1.0, 1.0),
    )
    expected = 1 + sum(1 / i for i in range(number - accepted + 1, number + 1))
    assert found["virtual_s"] / found["steps"] == pytest.approx(expected, rel=0.01)


def test_a_server_saturates_at_the_rate_of_its_link():
    load = Workload(num_parameters=1_000_000, num_samples=10**6, step_samples=1, steps=100)
    found = time_run(Async(), load, 32, Constant(0.05), Link(gbit_per_s=1.0))
    push_s = (4_000_000 + 128 + 160) * 8 / 1e9
    assert found["pushes"] / found["virtual_s"] == pytest.approx(1 / push_s, rel=0.02)


def test_a_codec_needs_to_know_how_much_travels():
    strategy = parse("async(push_wire=threshold(density=0.01))", "strategy")
    with pytest.raises(UsageError, match="push_share"):
        time_run(strategy, LOAD, 2)
    share = time_run(strategy, Workload(1000, 4000, 2, steps=4, push_share=0.02), 2)
    assert share["bytes_in"][0] == 8 * (128 + 128)


def test_a_server_that_judges_nobody_by_silence_sets_no_deadlines():
    """Of a push: its gradient, its arrival and the answer's; a deadline a message would be a fourth event."""
    found = time_run(Async(), Workload(1000, 6400, step_samples=32), 4, Constant(1.0), Link())
    assert found["pushes"] == 200 and 3 <= found["num_events"] / found["pushes"] < 3.2
