"""Runs whose replicas are threads of one process: what they make of a job, and how they end."""

import json
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.checkpoint import background_writer, newest
from mpitrain.checkpoint.parts import _digest
from mpitrain.data.read import prefetch
from mpitrain.errors import AgreedError, CheckpointError, InjectedError, OutputError, UsageError
from mpitrain.system import background
from mpitrain.system.files import run_lock
from mpitrain.training.in_threads import run as in_threads
from mpitrain.training.watchdog.watchdog import StalledError
from mpitrain.values import parse
from tests import toy
from tests.mpi import test_replay


def train(job, text, threads, path, **options):
    return mt.train(job, parse(text, "strategy"), threads=threads, run_dir=str(path), quiet=True, **options)


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def no_thread_left():
    return not [one.name for one in threading.enumerate() if one.name.startswith("mpitrain-rank")]


@pytest.mark.parametrize(
    "text",
    [
        "allreduce()",
        "async()",
        "sync(servers=2)",
        "ssp(bound=1)",
        "softsync(updates=1)",
        "localsgd(period=3)",
    ],
)
def test_one_thread_is_serial_training_to_the_bit(text, tmp_path):
    job = toy.make_job(optimizer=toy.sgd, epochs=3, batch_size=5)
    result = train(job, text, 1, tmp_path / "run")
    assert result["threads"] == result["workers"] == 1 and result["status"] == "ok"
    assert same(load_file(result["model"]), toy.serial(job))


@pytest.fixture
def switching():
    """Threads are switched as often as Python can: what they share by accident shows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


STRATEGIES = [text for text in test_replay.STRATEGIES if "aggregate" not in text]  # which threads refuse


@pytest.mark.parametrize("number", range(len(STRATEGIES)), ids=STRATEGIES)
def test_what_threads_did_is_repeated_in_virtual_time_to_the_bit(number, tmp_path, switching):
    """Parameters, gradients or random numbers that one thread changed under another would not come out again. The model
    draws, so gradients are computed in turn: `test_shards...` races them."""
    text = STRATEGIES[number]
    job = toy.make_job(optimizer=toy.sgd if number % 2 else toy.adam, epochs=4, batch_size=5)
    real = train(job, text, 3, tmp_path / "run")
    again = mt.simulate(
        job, parse(text, "strategy"), replay=str(tmp_path / "run"), run_dir=str(tmp_path / "v"), quiet=True
    )
    assert again["replay_identical"], text
    for key in ("accepted", "dropped", "late", "versions_skipped", "staleness_histogram", "samples"):
        assert again[key] == real[key], (text, key)


def test_shards_share_memory_with_nobody_by_accident(tmp_path, switching):
    """Four replicas, none of which draws, so that all compute at once, and three shards."""
    job = toy.make_job(model=lambda: toy.wide(300), optimizer=toy.adam, epochs=12, batch_size=3)
    assert train(job, "async(servers=3)", 4, tmp_path / "run")["staleness_max"] > 0
    again = mt.simulate(job, replay=str(tmp_path / "run"), run_dir=str(tmp_path / "v"), quiet=True)
    assert again["replay_identical"]


@pytest.mark.parametrize("text", ["async()", "allreduce()", "decentralized()", "localsgd(period=2)"])
def test_an_exception_names_its_replica_and_ends_the_others(text, tmp_path):
    def loss(model, batch):
        if threading.current_thread().name == "mpitrain-rank-2":
            raise ArithmeticError("my own mistake")
        return toy.square_loss(model, batch)

    with pytest.raises(ArithmeticError, match="my own mistake") as raised:
        train(toy.make_job(loss=loss, epochs=50), text, 3, tmp_path / "run")
    assert any("rank 2 (worker" in note for note in raised.value.__notes__)
    assert no_thread_left()
    record = json.loads((tmp_path / "run" / "errors" / "rank-2.json").read_text())
    assert record["type"] == "ArithmeticError" and "my own mistake" in record["traceback"]
    toy_run = train(toy.make_job(epochs=1), text, 2, tmp_path / "run")  # the process can train again
    assert toy_run["status"] == "ok"


class SgdWithSet(torch.optim.SGD):
    """An optimizer with a state that no checkpoint can hold, from its first step on."""

    def state_dict(self):
        found = super().state_dict()
        if self.seen_after == 0 or self.state:
            found["param_groups"][0]["seen"] = {1, 2}
        return found


@pytest.mark.parametrize("seen_after", [0, 1])
@pytest.mark.parametrize(
    "text", ["allreduce()", "localsgd(period=2)", "decentralized()", 'async(optimizer="worker")']
)
def test_a_state_that_no_checkpoint_can_hold_is_refused_before_the_first_step_or_after_it(
    text, seen_after, tmp_path
):
    def optimizer(parameters):
        made = SgdWithSet(parameters, lr=0.1, momentum=0.9)
        made.seen_after = seen_after
        return made

    steps = []

    def loss(model, batch):
        steps.append(1)
        return toy.square_loss(model, batch)

    with pytest.raises((AgreedError, UsageError)) as raised:
        train(toy.make_job(loss=loss, optimizer=optimizer, epochs=3, batch_size=4), text, 2, tmp_path / "run")
    assert raised.value.exit_code == 2 and (not steps if seen_after == 0 else 1 <= len(steps) <= 6)
    assert seen_after == 0 or "seen: a checkpoint cannot hold a set" in str(raised.value)
    assert no_thread_left()


def test_a_failed_background_write_is_told_and_the_third_ends_the_run(tmp_path, monkeypatch, capfd):
    def write(*arguments):
        raise RuntimeError("my file system")

    monkeypatch.setattr(background_writer, "write_part", write)
    job = toy.make_job(epochs=8, batch_size=4, checkpoint_every="16 samples")
    with pytest.raises(CheckpointError, match="3 checkpoints in a row.*my file system"):
        train(job, "async()", 2, tmp_path / "run")
    assert capfd.readouterr().out.count("RuntimeError: my file system") >= 3 and no_thread_left()


def test_a_run_whose_directory_another_job_takes_over_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "REFRESH_S", 0.01)
    taken = threading.Event()

    def loss(model, batch):
        if not taken.is_set():
            (tmp_path / "run" / "lock").write_text('{"attempt": "other", "host": "elsewhere", "pid": 1}')
            taken.set()
        return toy.square_loss(model, batch)

    with pytest.raises(OutputError, match="taken over by process 1 on host elsewhere"):
        train(toy.make_job(loss=loss, epochs=100_000), "async()", 2, tmp_path / "run")


@pytest.mark.parametrize("world", ["threads", "virtual"])
def test_a_thread_beside_a_run_that_fails_ends_the_run(world, tmp_path):
    def loss(model, batch):
        background.start("test", lambda: {}["our own mistake"]).join()
        return toy.square_loss(model, batch)

    job = toy.make_job(loss=loss, epochs=100 if world == "threads" else 1)
    with pytest.raises(KeyError, match="our own mistake"):
        if world == "threads":
            train(job, "async()", 2, tmp_path / "run")
        else:
            mt.simulate(job, mt.Async(), workers=2, run_dir=str(tmp_path / "run"), quiet=True)


def test_nobody_waits_for_a_thread_that_has_ended_while_it_read_ahead(tmp_path, monkeypatch):
    def dies(self):
        raise ZeroDivisionError("our own mistake")

    monkeypatch.setattr(prefetch.ReadAhead, "_choose", dies)
    job = toy.make_job(
        data=mt.Synthetic(64, x=((4,), "float32")), model=lambda: torch.nn.Linear(4, 1),
        loss=lambda model, batch: model(batch["x"]).square().mean(), batch_size=4, validate=None,
    )  # fmt: skip
    with pytest.raises(ZeroDivisionError, match="our own mistake"):
        train(job, "async()", 2, tmp_path / "run")
    assert no_thread_left()


@pytest.mark.parametrize("text", ["async()", "allreduce()", "decentralized()", "localsgd(period=2)"])
def test_a_checkpoint_whose_state_is_of_another_kind_is_refused_by_name(text, tmp_path):
    """Its digests are right: somebody has written it anew."""
    job = toy.make_job(epochs=2, batch_size=4, checkpoint_every="32 samples")
    train(job, text, 2, tmp_path / "run", steps=9)
    path = newest(tmp_path / "run").folder / "shard-0.json"
    record = json.loads(path.read_text())
    del record["self"]
    record["state"] = {"role": {"counts": 3}, "store": {}, "state": {"optimizer": 3}, "replica": {}}
    path.write_text(json.dumps(record | {"self": _digest(record)}))
    with pytest.raises(
        AgreedError, match="CheckpointError: .*holds a state that this run cannot go on from"
    ) as raised:
        train(job, text, 2, tmp_path / "run", resume="auto")
    assert raised.value.exit_code == 1 and no_thread_left()


def test_a_fault_that_a_run_meets_again_when_it_goes_on_is_told(tmp_path, capfd):
    fault = "--inject raise(worker=1,at_step=5) counts from this start on"
    options = {"threads": 2, "run_dir": str(tmp_path / "run"), "inject": "raise(worker=1, at_step=5)"}
    mt.train(
        toy.make_job(batch_size=12, epochs=1), mt.Async(), **options
    )  # four batches: it ends before the fault
    assert fault not in capfd.readouterr().err
    with pytest.raises(InjectedError):
        mt.train(toy.make_job(batch_size=12, epochs=9), mt.Async(), resume="auto", **options)
    assert fault in capfd.readouterr().err


def test_an_injected_failure_ends_the_run_and_a_silent_replica_is_evicted(tmp_path):
    job = toy.make_job(epochs=3, batch_size=4)
    with pytest.raises(InjectedError):
        train(job, "async()", 2, tmp_path / "run", inject="raise(worker=1, at_step=1)")
    result = train(job, "async()", 3, tmp_path / "run", inject="wedge(worker=2, at_step=1)", heartbeat_s=0.5)
    assert result["status"] == "ok" and result["samples"] == 3 * 48
    assert list(result["lost"]) == ["3"]


@pytest.mark.parametrize(
    ("text", "options", "match"),
    [
        ("pipeline(stages=2)", {}, "pipeline.*cuts one model.*over MPI"),
        ("tensor(parallel=2)", {}, "tensor.*cuts one model"),
        ("sharded()", {}, "sharded.*cuts one model"),
        ("allreduce(codec=float16())", {}, "leave codec out"),
        ("async()", {"inject": "kill(worker=0, at_step=1)"}, "kill.*ends or stops a process"),
        ("async()", {"inject": "torn(worker=0, at_step=1)"}, "nothing can tear"),
        ("async()", {"trace": "steps=1:2"}, "trace"),
    ],
)
def test_what_threads_cannot_do_is_refused_by_name(text, options, match, tmp_path):
    with pytest.raises(UsageError, match=match):
        train(toy.make_job(), text, 2, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_several_ranks_do_not_each_start_threads(tmp_path, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="this launch has 2 ranks"):
        train(toy.make_job(), "async()", 2, tmp_path / "run")


def test_a_mistake_is_said_once_and_ends_all(tmp_path, capfd):
    with pytest.raises(AgreedError) as raised:
        train(toy.make_job(data=toy.Memory(num_samples=3)), "async()", 4, tmp_path / "run")
    assert raised.value.exit_code == 2 and no_thread_left()
    assert capfd.readouterr().err.count("4 workers for 3 training samples") == 1


def test_torchs_threads_are_divided_and_given_back(tmp_path):
    seen, before = set(), torch.get_num_threads()

    def loss(model, batch):
        seen.add(torch.get_num_threads())
        return toy.square_loss(model, batch)

    torch.set_num_threads(4)
    try:
        train(toy.make_job(loss=loss, epochs=1), "async()", 2, tmp_path / "run")
        assert seen == {2} and torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_a_replica_that_hangs_is_named_by_its_watchdog(tmp_path, monkeypatch):
    monkeypatch.setattr(in_threads, "ENDING_S", 0.5)
    free = threading.Event()

    def loss(model, batch):
        if threading.current_thread().name == "mpitrain-rank-2":
            free.wait(60)
        return toy.square_loss(model, batch)

    try:
        with pytest.raises(StalledError, match="rank 2 .*no progress for 2 s") as raised:
            train(toy.make_job(loss=loss), "allreduce()", 3, tmp_path / "run", watchdog_s=2)
    finally:
        free.set()
    assert "rank 2" in raised.value.__notes__[0]
    assert "in loss" in (tmp_path / "run" / "stacks" / "rank-2.txt").read_text()


@pytest.mark.parametrize(
    "text",
    ["allreduce()", "localsgd(period=2)", "sync()", "async(servers=2)", "elastic()", "decentralized()"],
)
def test_a_run_that_is_shorter_than_its_time_to_validate_validates_at_its_end_alone(tmp_path, text):
    """Also where ranks agree on it: they ask one another twice a second, which this run takes longer than."""

    def loss(model, batch):
        time.sleep(0.05)
        return toy.square_loss(model, batch)

    job = toy.make_job(loss=loss, batch_size=4, epochs=3, validate=toy.Memory(8), validate_every="600s")
    train(job, text, 2, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["event"] for row in rows].count("validation") == 0
