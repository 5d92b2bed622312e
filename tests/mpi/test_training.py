"""Whole runs over real ranks: equal to serial training where a theorem says so, and every count adds up.

A launch costs a second and a run milliseconds, so all runs of a number of ranks are made in one launch of
`programs/training_runs.py`, each into a folder of its name; the tests compare what lies there.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from mpitrain import simulate
from mpitrain.strategies.sampling.step_partition import StepPartition
from mpitrain.values import parse
from tests import toy
from tests.mpi.cases import TCP, call, launch_calls
from tests.sampling import sampled

# Which runs each launch makes. Three ranks go over TCP, the others over shared memory.
IN_FLIGHT = "async(servers=2,inflight=2)"
BETWEEN_READS = (
    "elastic(moving_rate=0.3,push_every=2)",
    "async(optimizer='worker',push_every=4,pull_every=2)",
)
# name -> (name, strategy, samples a batch): one step of all data
DIVERGED = {
    name: (name, text, size)
    for name, text, size in (
        ("allreduce", "allreduce()", 24), ("averaged", "localsgd()", 24), ("served", "sync()", 48),
        ("peers", "decentralized()", 24), ("sharded", "sharded()", 24), ("tensor", "tensor(parallel=2)", 48),
        ("pipeline", "pipeline(stages=2)", 48),
    )
}  # fmt: skip
RUNS = {
    1: [call("allreduce")],
    2: [
        call("serial", 1), call("allreduce"), call("windows", 0), call("between_reads", *BETWEEN_READS),
        *(call("diverged", *row) for row in DIVERGED.values()),
        call("wrapped", "async(optimizer='worker',push_every=3)", True),
    ],
    3: [
        call("serial", 2), call("between_reads", IN_FLIGHT), call("lockstep", 1), call("windows", 1),
        call("nonfinite", "allreduce-skip", "allreduce()", "skip"),
        call("nonfinite", "allreduce-stop", "allreduce()", "stop"),
        call("nonfinite", "async-skip", "async()", "skip"),
        call("nonfinite", "async-stop", "async()", "stop"),
        call("wrapped", "async(servers=2,optimizer='worker',push_every=3,pull_every=2)", False),
    ],
    4: [
        call("serial", 3), call("allreduce"), call("windows", 0), call("lockstep", 2),
        call("nonfinite", "two-servers-stop", "async(servers=2)", "stop"),
    ],
    5: [call("counts"), call("lockstep", 1), call("windows", 1)],
}  # fmt: skip


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The folder of the runs of so many ranks, and how their launch ended; each is launched once."""
    done = {}

    def launch(ranks, **options):
        key = (ranks, *options.values())
        if key not in done:
            path = tmp_path_factory.mktemp(f"ranks-{ranks}")
            runs = [call("serial", 2)] if options else RUNS[ranks]
            mpirun_args = TCP if ranks == 3 and not options else ()
            ended = launch_calls(ranks, "training_runs", path, runs, mpirun_args=mpirun_args, **options)
            done[key] = path, ended
        path, result = done[key]
        assert result.code == (1 if ranks == 4 else 0), str(
            result
        )  # what was trained last ended by a nan there
        return path, result

    return launch


def result_of(path):
    return json.loads((path / "result.json").read_text())


def assert_equal(trained, expected):
    assert trained.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(trained[name], tensor), name


def assert_serial(path):
    for name in ("sgd", "adam", "two_groups", "hooked"):
        job = toy.make_job(optimizer=getattr(toy, name))
        assert_equal(load_file(path / f"serial-{name}" / "model.safetensors"), toy.serial(job))


@pytest.mark.parametrize("servers", sampled([1, 2, 3], {3}))
def test_async_with_one_worker_is_serial_training_bit_for_bit(launched, servers):
    assert_serial(launched(servers + 1)[0])


@pytest.mark.extended  # the test above is it in `make test-mpich`
def test_async_under_mpich_is_serial_training_bit_for_bit(launched):
    assert_serial(launched(3, mpi="mpich")[0])


def test_allreduce_with_split_batches_is_one_rank_with_the_full_batch(launched):
    paths = {size: launched(size)[0] for size in (1, 2, 4)}
    for index in range(len(toy.DYADIC)):
        assert result_of(paths[1] / f"allreduce-{index}")["steps"] == 3
        whole = load_file(paths[1] / f"allreduce-{index}" / "model.safetensors")
        for size in (2, 4):
            assert_equal(load_file(paths[size] / f"allreduce-{index}" / "model.safetensors"), whole)


def test_rows_by_rank_stay_on_rank_0_and_every_rank_is_given_the_rest(launched):
    """The end of a run of N ranks would otherwise be N rows to N ranks."""
    path = launched(5)[0] / "counts-1"
    returned = [json.loads((path / f"returned-{rank}.json").read_text()) for rank in range(5)]
    rows = result_of(path)["ranks"]
    assert returned[0]["ranks"] == rows and [row["rank"] for row in rows] == list(range(5))
    for rank, result in enumerate(returned):
        assert rank == 0 or result == returned[0] | {"ranks": [rows[rank]]}


def test_staleness_identity_and_counts_over_real_ranks(launched):
    path, _ = launched(5)
    for servers in (1, 2):
        result = result_of(path / f"counts-{servers}")
        shards = [rank for rank in result["ranks"] if rank["role"] == "server"]
        workers = [rank for rank in result["ranks"] if rank["role"] == "worker"]
        assert len(shards) == servers and len(workers) == 5 - servers
        for shard in shards:
            left, right = shard["staleness_identity"]
            assert left == right
            assert shard["version"] == shard["accepted"] == sum(shard["staleness_histogram"].values()) == 40
            assert shard["samples_accepted"] == 5 * 48
        assert sum(worker["steps"] for worker in workers) == 40
        assert sum(worker["samples"] for worker in workers) == 5 * 48
    assert result_of(path / "ragged")["samples"] == 3 * 48
    ragged = result_of(path / "ragged-allreduce")  # 48 = 35 + 13: the rest is shared out 3, 3, 3, 2, 2
    assert ragged["samples"] == 3 * 48 and ragged["steps"] == 6 and ragged["samples_left_out"] == 0
    dropped = result_of(path / "dropped")
    assert dropped["samples"] == 3 * 35 and dropped["steps"] == 3 and dropped["samples_left_out"] == 3 * 13


def simulated(text, path, **options):
    options = {"workers": 1, "run_dir": str(path), "quiet": True} | options
    data = toy.Memory(num_samples=options.pop("num_samples", 48), num_features=5)
    return load_file(simulate(toy.make_job(data=data), parse(text, "strategy"), **options)["model"])


def test_one_worker_makes_the_same_bits_in_both_worlds(launched, tmp_path):
    real = load_file(launched(3)[0] / "serial-sgd" / "model.safetensors")
    assert_equal(real, simulated("async(servers=2)", tmp_path))


@pytest.mark.parametrize(
    ("ranks", "index", "text"), [(2, 0, BETWEEN_READS[0]), (2, 1, BETWEEN_READS[1]), (3, 0, IN_FLIGHT)]
)
def test_one_worker_makes_the_same_bits_in_both_worlds_whatever_it_does_between_reads(
    launched, tmp_path, ranks, index, text
):
    real = load_file(launched(ranks)[0] / f"between-{index}" / "model.safetensors")
    assert_equal(real, simulated(text, tmp_path, schedule="decay(every=0.5)", num_samples=96))


@pytest.mark.parametrize(("ranks", "schedules"), [(2, True), (3, False)])
def test_a_wrapped_loop_may_keep_its_own_optimizer_and_schedule(launched, ranks, schedules):
    """One worker: whatever it pushes together, the servers end where torch's own loop does, on dyadic data."""
    model = toy.linear_float32()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4, momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5) if schedules else None
    reader = toy.Memory().reader(None, 0)
    for step in range(10):
        optimizer.zero_grad()
        toy.linear_loss(model, reader.batch(0, 4 * step, 4)).backward()
        optimizer.step()
        if schedule:
            schedule.step()
    assert_equal(torch.load(launched(ranks)[0] / "wrapped.pt"), model.state_dict())


@pytest.mark.parametrize(("ranks", "name"), [(3, "allreduce"), (3, "async"), (4, "two-servers")])
def test_a_nan_loss_stops_with_status_fail_and_names_rank_and_step(launched, ranks, name):
    path, launch = launched(ranks)
    if ranks == 4:  # it was the last run there
        assert launch.code == 1 and "nan" in launch.stderr and not launch.stdout.strip()
    result = result_of(path / f"nan-{name}-stop")
    assert (result["status"], result["exit_code"]) == ("fail", 1)
    assert "rank 2 (worker, step 1)" in result["failure"] and "nan" in result["failure"]
    trained = load_file(path / f"nan-{name}-stop" / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in trained.values())


@pytest.mark.parametrize("name", ["allreduce", "async"])
def test_a_nan_loss_can_be_skipped_and_is_counted(launched, name):
    result = result_of(launched(3)[0] / f"nan-{name}-skip")
    assert result["nonfinite"] == 1 and result["status"] == "ok"


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (4, 1), (2, 2)])
def test_synchronous_rules_are_one_rank_with_the_full_batch(launched, workers, servers):
    """sync, backup without spares and blocking softsync with S = N equal allreduce, which equals one rank, on dyadic
    gradients; ssp does not average, so it only has to take N times as many steps."""
    one, path = launched(1)[0], launched(workers + servers)[0]
    for index in range(len(toy.DYADIC)):
        whole = load_file(one / f"allreduce-{index}" / "model.safetensors")
        for rule in ("sync", "backup", "softsync"):
            assert_equal(load_file(path / f"{rule}-{index}" / "model.safetensors"), whole)
            result = result_of(path / f"{rule}-{index}")
            assert result["steps"] == 3 and result["accepted"] == 3 * workers
            assert result["late"] == result["dropped"] == result["staleness_max"] == 0
        assert result_of(path / f"ssp-{index}")["steps"] == 3 * workers


@pytest.mark.parametrize(("ranks", "name"), [(2, "weighted"), (4, "weighted"), (2, "weighted-sharded")])
def test_a_loss_that_tells_its_weight_is_divided_by_the_weight_of_all_ranks(launched, ranks, name):
    """As one rank does with the whole batch, to rounding; so is what validation says of it."""
    one, many = launched(1)[0] / "weighted", launched(ranks)[0] / name
    expected, trained = (load_file(path / "model.safetensors") for path in (one, many))
    for key, tensor in expected.items():
        torch.testing.assert_close(trained[key], tensor, rtol=1e-5, atol=1e-6)
    result, whole = result_of(many), toy.Memory(52).reader(None, 0).batch(0, 0, 52)
    module = toy.smooth()
    module.load_state_dict(trained)
    total, weight = toy.weighted_loss(module, whole)
    assert result["validation_loss"] == pytest.approx(float(total / weight), rel=1e-5)
    assert result["metrics_reduction"] == ("" if name == "weighted-sharded" else "mean over batches")


@pytest.mark.parametrize("servers", [1, 2])
def test_two_workers_draw_the_dropout_that_allreduce_draws(launched, servers):
    """Bit for bit in float32: the sum of two has only one order."""
    served, alone = launched(2 + servers)[0] / "dropout", launched(2)[0] / "dropout"
    assert_equal(load_file(served / "model.safetensors"), load_file(alone / "model.safetensors"))


@pytest.mark.parametrize("workers", [2, 4])
def test_over_several_windows_allreduce_trains_on_the_batches_that_servers_deal(launched, workers):
    """Bit for bit on dyadic gradients, with 13 windows of which each worker reads its own, and the last round, too."""
    first, second, *_ = StepPartition(52, 16 // workers, workers, 4).take_step().leases
    assert first.start + first.num_samples < second.start  # so it is not one run shared out
    peers, served = launched(workers)[0], launched(workers + 1)[0]
    for index in range(len(toy.DYADIC)):
        expected = load_file(peers / f"windows-allreduce-{index}" / "model.safetensors")
        for rule in ("sync", "backup", "softsync"):
            run = served / f"windows-{rule}-{index}"
            assert_equal(load_file(run / "model.safetensors"), expected)
            assert result_of(run)["steps"] == 4


@pytest.mark.parametrize("name", sorted(DIVERGED))
def test_a_model_that_is_not_finite_fails_the_run_in_both_worlds(launched, tmp_path, name):
    """Every gradient was finite; what the last step made of it is not, and nothing validates."""
    real = result_of(launched(2)[0] / f"diverged-{name}")
    _, text, size = DIVERGED[name]
    job = toy.make_job(**toy.DIVERGING, batch_size=size)
    workers = 1 if name == "served" else 2
    virtual = simulate(job, parse(text, "strategy"), workers=workers, run_dir=str(tmp_path), quiet=True)
    for result in (real, virtual):
        assert (result["status"], result["exit_code"], result["steps"]) == ("fail", 1, 1)
        assert "training diverged" in result["failure"] and "NaN or an infinity" in result["failure"]
