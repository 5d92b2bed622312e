"""Whole runs over real ranks: equal to serial training where a theorem says so, and every count adds up."""

import json

import pytest
import torch
from safetensors.torch import load_file

from mpitrain import Async, simulate
from mpitrain.text import parse
from tests import toy
from tests.ranks import run_ranks

TCP = ("--mca", "pml", "ob1", "--mca", "btl", "self,tcp")
OPTIMIZERS = {"momentum": toy.sgd, "adam": toy.adam, "two_groups": toy.two_groups}

SERIAL = """
import sys
import mpitrain as mt
from tests import toy

for name in ("sgd", "adam", "two_groups"):
    job = toy.make_job(optimizer=getattr(toy, name))
    mt.train(job, mt.Async(servers={servers}), run_dir=f"{path}/{{name}}", quiet=True)
"""


def result_of(path):
    return json.loads((path / "result.json").read_text())


def assert_equal(trained, expected):
    assert trained.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(trained[name], tensor), name


@pytest.mark.parametrize(("servers", "mpirun_args"), [(1, ()), (2, TCP), (3, ())])
def test_async_with_one_worker_is_serial_training_bit_for_bit(tmp_path, servers, mpirun_args):
    run_ranks(servers + 1, SERIAL.format(servers=servers, path=tmp_path), mpirun_args=mpirun_args).check()
    for name in ("sgd", "adam", "two_groups"):
        job = toy.make_job(optimizer=getattr(toy, name))
        assert_equal(load_file(tmp_path / name / "model.safetensors"), toy.serial(job, rank=servers))


def test_async_under_mpich_is_serial_training_bit_for_bit(tmp_path):
    run_ranks(3, SERIAL.format(servers=2, path=tmp_path), mpi="mpich").check()
    for name in ("sgd", "adam", "two_groups"):
        job = toy.make_job(optimizer=getattr(toy, name))
        assert_equal(load_file(tmp_path / name / "model.safetensors"), toy.serial(job, rank=2))


DYADIC = """
import mpitrain as mt
from tests import toy
from mpitrain.mpi.runtime import start

size = start().size
for index, changes in enumerate(toy.DYADIC.values()):
    job = toy.make_job(**changes, epochs=1, batch_size=16 // size)
    mt.train(job, run_dir=f"{path}/{{size}}-{{index}}", quiet=True)
"""


def test_allreduce_with_split_batches_is_one_rank_with_the_full_batch(tmp_path):
    for size in (1, 2, 4):
        run_ranks(size, DYADIC.format(path=tmp_path)).check()
    for index in range(len(toy.DYADIC)):
        whole = load_file(tmp_path / f"1-{index}" / "model.safetensors")
        assert result_of(tmp_path / f"1-{index}")["steps"] == 3
        for size in (2, 4):
            assert_equal(load_file(tmp_path / f"{size}-{index}" / "model.safetensors"), whole)


COUNTS = """
import mpitrain as mt
from tests import toy

for servers in (1, 2):
    mt.train(toy.make_job(epochs=5), mt.Async(servers=servers), run_dir=f"{path}/{{servers}}", quiet=True)
mt.train(toy.make_job(epochs=3, batch_size=7), mt.Async(), run_dir="{path}/ragged", quiet=True)
mt.train(toy.make_job(epochs=3, batch_size=7), run_dir="{path}/ragged-allreduce", quiet=True)
mt.train(toy.make_job(epochs=3, batch_size=7, drop_last=True), run_dir="{path}/dropped", quiet=True)
"""


def test_staleness_identity_and_counts_over_real_ranks(tmp_path):
    run_ranks(5, COUNTS.format(path=tmp_path)).check()
    for servers in (1, 2):
        result = result_of(tmp_path / str(servers))
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
    assert result_of(tmp_path / "ragged")["samples"] == 3 * 48
    ragged = result_of(tmp_path / "ragged-allreduce")  # 48 = 35 + 13: the rest is shared out 3, 3, 3, 2, 2
    assert ragged["samples"] == 3 * 48 and ragged["steps"] == 6 and ragged["samples_left_out"] == 0
    dropped = result_of(tmp_path / "dropped")
    assert dropped["samples"] == 3 * 35 and dropped["steps"] == 3 and dropped["samples_left_out"] == 3 * 13


def test_one_worker_makes_the_same_bits_in_both_worlds(tmp_path):
    run_ranks(3, SERIAL.format(servers=2, path=tmp_path)).check()
    virtual = simulate(
        toy.make_job(), Async(servers=2), workers=1, run_dir=str(tmp_path / "virtual"), quiet=True
    )
    assert_equal(load_file(tmp_path / "sgd" / "model.safetensors"), load_file(virtual["model"]))


WRAPPED = """
import torch, json
from pathlib import Path
import mpitrain as mt
from tests import toy

rates = []
torch.manual_seed(3)
model = toy.linear_float32()
optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4, momentum=0.5)
model, optimizer = mt.wrap(model, optimizer, {strategy})
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5) if {schedules} else None
reader = toy.Memory().reader(None, 0)
for step in range(10):
    optimizer.zero_grad()
    toy.linear_loss(model, reader.batch(0, 4 * step, 4)).backward()
    optimizer.step()
    if schedule:
        schedule.step()
mt.finish()
torch.save(model.state_dict(), Path("{path}"))
"""


@pytest.mark.parametrize(
    ("strategy", "schedules", "mpirun_args"),
    [
        ('mt.Async(optimizer="worker", push_every=3)', True, ()),
        ('mt.Async(servers=2, optimizer="worker", push_every=3, pull_every=2)', False, TCP),
    ],
)
def test_a_wrapped_loop_may_keep_its_own_optimizer_and_schedule(tmp_path, strategy, schedules, mpirun_args):
    """One worker: whatever it pushes together, the servers end where torch's own loop does, on dyadic data."""
    path = tmp_path / "model.pt"
    script = WRAPPED.format(strategy=strategy, schedules=schedules, path=path)
    run_ranks(3 if "servers=2" in strategy else 2, script, mpirun_args=mpirun_args).check()
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
    assert_equal(torch.load(path), model.state_dict())


WORLDS = (
    "async(servers=2,inflight=2)",
    "elastic(moving_rate=0.3,push_every=2)",
    "async(optimizer='worker',push_every=4,pull_every=2)",
)

IN_FLIGHT = """
import mpitrain as mt
from mpitrain.text import parse
from mpitrain.mpi.runtime import start
from tests import toy

for index, text in enumerate({strategies!r}):
    job = toy.make_job(data=toy.Memory(num_samples=96, num_features=5))
    mt.train(job, parse(text, "strategy"), run_dir="{path}/" + str(index), quiet=True, schedule="decay(every=0.5)")
"""


def test_one_worker_makes_the_same_bits_in_both_worlds_whatever_it_does_between_reads(tmp_path):
    for servers in (1, 2):
        texts = [text for text in WORLDS if ("servers=2" in text) == (servers == 2)]
        path = tmp_path / str(servers)
        run_ranks(1 + servers, IN_FLIGHT.format(strategies=texts, path=path)).check()
        for index, text in enumerate(texts):
            virtual = simulate(
                toy.make_job(data=toy.Memory(num_samples=96, num_features=5)), parse(text, "strategy"), workers=1,
                run_dir=str(path / f"v{index}"), quiet=True, schedule="decay(every=0.5)",
            )  # fmt: skip
            real = load_file(path / str(index) / "model.safetensors")
            assert_equal(real, load_file(virtual["model"]))


NONFINITE = """
import mpitrain as mt
from mpitrain.mpi.runtime import start
from tests import toy

rank = start().rank
calls = []  # every worker is dealt two batches before anybody is dealt a third

def loss(model, batch):
    calls.append(1)
    value = toy.square_loss(model, batch)
    return value / 0 * (value - value) if rank == {bad_rank} and len(calls) == 2 else value

job = toy.make_job(loss=loss, epochs=2, batch_size=3, on_nonfinite="{on_nonfinite}")
result = mt.train(job, {strategy}, run_dir="{path}", quiet=True)
raise SystemExit(result["exit_code"])
"""


@pytest.mark.parametrize("strategy", ["mt.AllReduce()", "mt.Async()", "mt.Async(servers=2)"])
def test_a_nan_loss_stops_with_status_fail_and_names_rank_and_step(tmp_path, strategy):
    script = NONFINITE.format(bad_rank=2, on_nonfinite="stop", strategy=strategy, path=tmp_path)
    run = run_ranks(3 if strategy != "mt.Async(servers=2)" else 4, script)
    assert run.code == 1, str(run)
    assert "status=fail" in run.stdout.strip().splitlines()[-1]
    result = result_of(tmp_path)
    assert "rank 2 (worker, step 1)" in result["failure"] and "nan" in result["failure"]
    assert all(torch.isfinite(tensor).all() for tensor in load_file(tmp_path / "model.safetensors").values())


@pytest.mark.parametrize("strategy", ["mt.AllReduce()", "mt.Async()"])
def test_a_nan_loss_can_be_skipped_and_is_counted(tmp_path, strategy):
    script = NONFINITE.format(bad_rank=2, on_nonfinite="skip", strategy=strategy, path=tmp_path)
    run_ranks(3, script).check()
    result = result_of(tmp_path)
    assert result["nonfinite"] == 1 and result["status"] == "ok"


LOCKSTEP = """
import mpitrain as mt
from tests import toy
from mpitrain.mpi.runtime import start

workers = start().size - {servers}
rules = [
    mt.Sync(servers={servers}), mt.Backup(spare=0, servers={servers}),
    mt.SoftSync(updates=workers, blocking=True, servers={servers}), mt.StaleSync(bound=0, servers={servers}),
]
for index, changes in enumerate(toy.DYADIC.values()):
    for rule in rules:
        job = toy.make_job(**changes, epochs=1, batch_size=16 // workers)
        mt.train(job, rule, run_dir=f"{path}/{{rule.name}}-{{index}}", quiet=True)
"""


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (4, 1), (2, 2)])
def test_synchronous_rules_are_one_rank_with_the_full_batch(tmp_path, workers, servers):
    """sync, backup without spares and blocking softsync with S = N equal allreduce, which equals one rank, on dyadic
    gradients; ssp does not average, so it only has to take N times as many steps."""
    run_ranks(1, DYADIC.format(path=tmp_path)).check()
    run_ranks(workers + servers, LOCKSTEP.format(path=tmp_path, servers=servers)).check()
    for index in range(len(toy.DYADIC)):
        whole = load_file(tmp_path / f"1-{index}" / "model.safetensors")
        for rule in ("sync", "backup", "softsync"):
            assert_equal(load_file(tmp_path / f"{rule}-{index}" / "model.safetensors"), whole)
            result = result_of(tmp_path / f"{rule}-{index}")
            assert result["steps"] == 3 and result["accepted"] == 3 * workers
            assert result["late"] == result["dropped"] == result["staleness_max"] == 0
        assert result_of(tmp_path / f"ssp-{index}")["steps"] == 3 * workers
