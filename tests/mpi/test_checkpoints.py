"""Interrupted and resumed over real ranks: bit for bit where it is a theorem, and every sample once everywhere."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from mpitrain import Decay, Sync, simulate
from mpitrain.checkpoint.parts import FOLDER, _digest, folder_of, newest, write_part
from mpitrain.system.files.run_directory import Identity
from mpitrain.system.files.run_lock import RunLock
from mpitrain.training.job_file import load_job
from mpitrain.training.measure import same_model
from mpitrain.values import parse
from tests import toy
from tests.mpi.cases import PROGRAMS, call, launch_calls, launch_program
from tests.ranks import needs_open_mpi, warm_environment
from tests.sampling import asked_for, sampled

# One launch trains every strategy to its end, writing checkpoints; the next resumes each from its first one.

EXACT = {
    "allreduce": ("allreduce()", "adam"),
    "threshold": ("allreduce(codec=threshold(density=0.1,dense_below=0))", "sgd"),
    "localsgd": ("localsgd(period=2,average_optimizer=True,outer=diloco())", "adam"),
    "sync": ("sync(servers=2)", "two_groups"),
    "blocking": ("softsync(updates=2,blocking=True,servers=2)", "sgd"),
    "own-optimizer": ("sync(servers=2,optimizer='worker',push_every=2)", "adam"),
    "wires": ("sync(servers=2,push_wire='bfloat16',reply_wire='float16')", "adam"),
    "coded": (
        "sync(servers=2,push_wire=threshold(density=0.1,dense_below=0),reply_wire=eightbit(dense_below=0))",
        "adam",
    ),
    "peers": ("decentralized(codec=threshold(density=0.1,dense_below=0))", "sgd"),
    "ring": ("decentralized(topology='ring',codec=topk(density=0.2,dense_below=0))", "adam"),
    "exponential": ("decentralized(topology='exponential',resync=4)", "two_groups"),
}
PEERS = {"asynchronous": ("decentralized(codec=eightbit(dense_below=0),asynchronous=True,resync=3)", "sgd")}
ASYNC = {
    "async": ("async(servers=2,damping=inverse())", "adam"),
    "ssp": ("ssp(bound=1,servers=2)", "sgd"),
    "elastic": ("elastic(push_every=2,servers=2)", "sgd"),
    "coded async": ("async(servers=2,push_wire=topk(density=0.1),reply_wire=threshold(density=0.1))", "sgd"),
    "in-flight": ("async(servers=2,inflight=2)", "sgd"),
    "bounded": ("bounded(staleness=1,servers=2)", "sgd"),
    "warm": ("softsync(updates=2,servers=2,warmup=warmup(1,epochs=3))", "sgd"),
}
# what `make test` runs of them; virtual time tries every strategy (tests/virtual/test_exactly_once.py)
SAMPLE = ("allreduce", "localsgd", "coded", "ring", "async")


def result_of(path):
    return json.loads((path / "result.json").read_text())


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Every strategy that is asked for, trained whole, and again from a copy of its first checkpoint."""
    asked = asked_for(request, "name")
    rows = {name: row for name, row in (EXACT | ASYNC | PEERS).items() if name in asked}
    return train_and_resume(tmp_path_factory.mktemp("runs"), rows)


@pytest.fixture(scope="module")
def mpich_runs(request, tmp_path_factory):
    """The same under MPICH, of those whose bits are a theorem."""
    asked = asked_for(request, "of_mpich")
    rows = {name: row for name, row in EXACT.items() if name in asked}
    return train_and_resume(tmp_path_factory.mktemp("mpich"), rows, "mpich")


def train_and_resume(path, rows, mpi="openmpi"):
    whole = [call("train", name, *row) for name, row in rows.items()]
    launch_calls(4, "checkpointed_runs", path, whole, mpi=mpi).check()
    again = []
    for name, (text, optimizer) in rows.items():
        first = sorted((path / name / FOLDER).iterdir())[0]
        copy = path / f"{name}-resumed" / FOLDER
        copy.mkdir(parents=True)
        os.rename(first, copy / first.name)
        again.append(call("train", f"{name}-resumed", text, optimizer, "auto"))
    launch_calls(4, "checkpointed_runs", path, again, mpi=mpi).check()
    return path


@pytest.mark.parametrize("name", sampled(EXACT, SAMPLE))
def test_a_resumed_synchronous_run_is_the_uninterrupted_one_bit_for_bit(runs, name):
    assert_same_bits(runs, name)


@pytest.mark.parametrize("name", sampled(EXACT | ASYNC | PEERS, SAMPLE))
def test_all_ranks_together_read_a_checkpoint_once(runs, name):
    """Those that go on with a part read it while they verify it; what all go on with they are sent. Workers that have
    written nothing take the buffers of the first one."""
    resumed = runs / f"{name}-resumed"
    first = min((resumed / FOLDER).glob("0*"))
    size = sum(file.stat().st_size for file in first.rglob("*.safetensors"))
    assert size <= sum(int(file.read_text()) for file in resumed.glob("read-*")) <= 1.02 * size
    assert not any(int(file.read_text()) for file in (runs / name).glob("read-*"))


@pytest.mark.parametrize("of_mpich", sampled(EXACT, ()))  # the checkpoints know nothing of MPI
def test_under_mpich_it_is_too(mpich_runs, of_mpich):
    assert_same_bits(mpich_runs, of_mpich)


def assert_same_bits(runs, name):
    whole, resumed = result_of(runs / name), result_of(runs / f"{name}-resumed")
    assert 96 <= resumed["resumed_from"] < 192
    assert resumed["samples"] == whole["samples"] == 6 * 48
    assert resumed["steps"] == whole["steps"]
    assert same_model(runs / name / "model.safetensors", runs / f"{name}-resumed" / "model.safetensors")


@pytest.mark.parametrize("name", sampled(EXACT, SAMPLE))
def test_virtual_time_writes_the_checkpoints_of_the_run(runs, tmp_path, name):
    """As many, by the ranks that write any."""
    text, optimizer = EXACT[name]
    strategy = parse(text, "strategy")
    job = toy.make_job(
        epochs=6, batch_size=4, optimizer=getattr(toy, optimizer), checkpoint_every="96", strategy=strategy,
        data=toy.Memory(window_samples=4), schedule=Decay(every=2, by=0.5),
    )  # fmt: skip
    workers = 4 - strategy.num_servers() if "servers" in text else 4
    seen = simulate(job, workers=workers, run_dir=str(tmp_path), quiet=True, checkpoint_every="96")
    written = {
        rank["checkpoints"]["num_written"]
        for rank in result_of(runs / name)["ranks"]
        if "checkpoints" in rank
    }
    assert written - {0} == {seen["checkpoints"]["num_written"]} and max(written) >= 2


@pytest.mark.parametrize("name", PEERS)
def test_resumed_asynchronous_peers_take_every_sample_once(runs, name):
    resumed = result_of(runs / f"{name}-resumed")
    assert 96 <= resumed["resumed_from"] < 192 and resumed["samples"] == 6 * 48
    assert resumed["status"] == "ok" and resumed["steps"] == result_of(runs / name)["steps"]
    assert resumed["leg"] == 2 and resumed["leg_samples"] == resumed["samples"] - resumed["resumed_from"]


@pytest.mark.parametrize("name", sampled(ASYNC, SAMPLE))
def test_a_resumed_asynchronous_run_takes_every_sample_once(runs, name):
    resumed = result_of(runs / f"{name}-resumed")
    assert 96 <= resumed["resumed_from"] < 192 and resumed["samples"] == 6 * 48
    left, right = resumed["staleness_identity"]
    assert left == right and resumed["status"] == "ok"


def test_another_number_of_servers_goes_on_from_there_bit_for_bit(tmp_path):
    """One worker, two parameter groups, AdamW: shards cut anew hold the same numbers, whoever owns them."""

    def train(ranks, name, servers, resume):
        run = call("train", name, f"sync(servers={servers})", "two_groups", resume, linear=True)
        launch_calls(ranks, "checkpointed_runs", tmp_path, [run]).check()

    train(3, "whole", 2, None)
    first, *later = sorted((tmp_path / "whole" / FOLDER).glob("0*"))
    for folder in later:
        shutil.rmtree(folder)
    for servers in (1, 3):
        train(1 + servers, str(servers), servers, str(tmp_path / "whole"))
        resumed = result_of(tmp_path / str(servers))
        assert resumed["resumed_from"] == int(first.name) == 96 and resumed["samples"] == 6 * 48
        assert same_model(
            tmp_path / "whole" / "model.safetensors", tmp_path / str(servers) / "model.safetensors"
        )


# to one rank as it computes, to one that waits inside a collective, and to mpirun, which hands it on to all
SIGNALS = {
    "async": ("async()", 2, "SIGTERM"),
    "ring": ("decentralized(topology='ring')", 3, "SIGTERM"),
    "allreduce": ("allreduce()", 1, "SIGUSR1 waiting"),
    "sync": ("sync(servers=2)", 3, "SIGUSR1 mpirun"),
}
SIGNALS_OF_THE_SAMPLE = ("sync",)


@pytest.mark.parametrize("name", sampled(SIGNALS, SIGNALS_OF_THE_SAMPLE))
def test_a_signal_leads_to_a_checkpoint_and_exit_75_and_the_next_start_goes_on(tmp_path, name):
    text, victim, how = SIGNALS[name]
    if how.endswith("mpirun"):
        needs_open_mpi("what Hydra hands on ends a rank before the launch by hand can")
    first = launch_calls(4, "signalled_runs", tmp_path, [call("run", name, text, None, victim, how)])
    assert first.code == 75, first
    stopped, found = result_of(tmp_path / name), newest(tmp_path / name)
    assert (stopped["status"], stopped["exit_code"]) == ("requeue", 75)
    assert (tmp_path / name / "REQUEUE").exists() and 0 < found.checkpoint_at < 40 * 48
    second = [call("run", name, text, "auto"), call("run", "whole", text)]
    launch_calls(4, "signalled_runs", tmp_path, second).check()
    ended = result_of(tmp_path / name)
    assert ended["resumed_from"] == found.num_samples() >= found.checkpoint_at and ended["samples"] == 40 * 48
    assert ended["status"] == "ok" and not (tmp_path / name / "REQUEUE").exists()
    if name != "async":
        assert same_model(tmp_path / "whole" / "model.safetensors", tmp_path / name / "model.safetensors")


def test_launch_starts_a_killed_run_again_while_there_is_progress(tmp_path):
    """Without fault tolerance a dead rank ends the job; the launcher resumes it, twice here, to the same end."""
    job = str(PROGRAMS / "crashing_job.py")
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    command = [
        sys.executable,
        "-m",
        "mpitrain",
        "launch",
        "-n",
        "3",
        "train",
        job,
        "--quiet",
    ]
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 240}
    env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    run = [*command, "--strategy", "sync()", "--run-dir", str(tmp_path / "run")]
    earlier = Identity("earlier", "a")  # a run that has come further, and a folder that is nobody's
    write_part(folder_of(tmp_path / "run", 5530), "shard-0", {}, earlier, ["shard-0"], {})
    (tmp_path / "run" / FOLDER / "notes").mkdir()
    ended = subprocess.run(run, env=warm_environment(env, tmp_path / "ranks"), **options)
    assert ended.returncode == 0, ended.stderr
    assert "restart 2 of 3 from the checkpoint at" in ended.stderr and "restart 3" not in ended.stderr
    result = result_of(tmp_path / "run")
    assert result["samples"] == 480 and 0 < result["resumed_from"] < 480
    assert result["resumed_run"] == result["run"] != "earlier" and not (tmp_path / "run" / "lock").exists()
    assert newest(tmp_path / "run" / "earlier-earlier").checkpoint_at == 5530
    whole = simulate(load_job(job), Sync(), workers=2, run_dir=str(tmp_path / "whole"), quiet=True)
    assert same_model(tmp_path / "run" / "model.safetensors", whole["model"])


def test_a_checkpoint_of_another_job_none_or_a_damaged_one_is_said_once_and_all_leave(tmp_path):
    """And one of the first version, a run directory that another job holds; last, a disk that is full at the end."""
    folder = tmp_path / "damaged" / FOLDER / f"{100:012d}"
    folder.mkdir(parents=True)
    (folder / "shard-0.json").write_text("{}")
    old = {"schema": 1, "part": "shard-0", "needs": ["shard-0"], "about": {}, "state": {}}
    folder = tmp_path / "outdated" / FOLDER / f"{100:012d}"
    folder.mkdir(parents=True)
    (folder / "shard-0.json").write_text(json.dumps(old | {"self": _digest(old)}))
    (tmp_path / "held").mkdir()
    lock = RunLock(tmp_path / "held", "theirs")
    lock.take()
    run = launch_program(3, "refused_checkpoints", str(tmp_path))
    lock.release()
    assert run.code == 1, run
    assert "model.safetensors: " in run.ranks_err[1] and "File too large" in run.ranks_err[1], run
    assert "Traceback" not in run.stderr, run
    told = dict(part.split("\n", 1) for part in run.ranks_err[0].split("== ")[1:])
    told.pop("full")
    said = {
        "start": ("was written by another run: its parameters are", "code 2"),
        "nowhere": ("no checkpoint there", "code 2"),
        "damaged": ("verifies: ", "code 1"),
        "outdated": ("whose checkpoints have schema 1, and this mpitrain", "code 2"),
        "held": (f"in use by process {os.getpid()} on host", "code 2"),
    }
    assert told.keys() == said.keys()
    for name, (text, code) in said.items():
        assert told[name].count(text) == 1 and told[name].splitlines()[-1] == code, told[name]
        assert [other.split("== ")[1:].count(f"{name}\n{code}\n") for other in run.ranks_err[1:]] == [1, 1]
