"""Which algorithm carries a run's allreduces is kept, and taken again by a resume: its bits depend on no timing."""

import json

import pytest

from mpitrain.errors import UsageError
from mpitrain.mpi.allreduce_plan import VARIABLE, Plan, Transport
from mpitrain.training.measure import same_model
from tests.ranks import run_ranks

PROGRAM = """
import json, os, shutil
from pathlib import Path
import torch
from torch import nn
import mpitrain as mt
from mpitrain.mpi.process_group.base import GroupBase
from mpitrain.mpi.allreduce_plan import VARIABLE, Plan, Transport
from mpitrain.mpi.runtime import start
from tests import toy

runtime, root = start(), Path("{path}")
FAST, SLOW = Transport(1e-6, 1e11), Transport(1e-4, 1e7)  # the library is trusted on fast links only


def model():
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1))


def train(name, transport, nodes=(0, 0, 1), pin=None, strategy="allreduce()", **options):
    runtime.nodes, runtime.num_nodes = list(nodes), max(nodes) + 1
    runtime.allreduce_plan = Plan(runtime.nodes)  # as in another process
    calls = []

    def measure(group, may_block):
        calls.append(1)
        return transport
        yield

    GroupBase._measure = measure
    os.environ.pop(VARIABLE, None)
    os.environ.update({{VARIABLE: pin}} if pin else {{}})
    job = toy.make_job(
        model=model, data=toy.Memory(60, num_features=64), epochs=3, batch_size=4, checkpoint_every="50",
        keep_checkpoints=9,
    )
    mt.train(job, run_dir=str(root / name), quiet=True, strategy=strategy, **options)
    (root / name / f"measured-{{runtime.rank}}").write_text(str(len(calls)))


def again(name, came_from, *arguments, **options):
    folder = root / f"{{name}}-from" / "checkpoints"
    if runtime.rank == 0:
        first = sorted((root / came_from / "checkpoints").glob("[0-9]*"))[0]
        shutil.copytree(first, folder / first.name)
    runtime.barrier()
    train(name, *arguments, resume=str(folder.parent), **options)


train("slow", SLOW)
again("slow-again", "slow", FAST)
again("pinned", "slow", FAST, pin="library")
again("pinned-again", "pinned", SLOW)
again("elsewhere", "slow", FAST, nodes=(0, 1, 2))
train("shards", SLOW, strategy="sharded()")
"""


def test_a_plan_goes_over_to_ranks_that_lie_alike_only(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    first = Plan([0, 0, 1])
    kept = first.state()
    first.learn([[0, 1], [2]], Transport(1e-4, 1e7))  # after the state was asked for, and in it nevertheless
    kept = json.loads(json.dumps(kept))
    again, moved = Plan([0, 0, 1]), Plan([0, 1, 1])
    assert again.adopt(kept) and again.known([[0, 1], [2]]) == Transport(1e-4, 1e7)
    assert again.known([[0], [2]]) is None
    assert not moved.adopt(kept) and moved.known([[0, 1], [2]]) is None
    monkeypatch.setenv(VARIABLE, "direct")
    assert again.setting() == "direct"
    pinned = again.state()
    monkeypatch.delenv(VARIABLE)
    assert again.setting() == "auto" and again.adopt(pinned) and again.setting() == "direct"
    assert not again.adopt(None) and again.setting() == "auto"  # a run of its own
    again.renumber([0, 1])
    assert again.known([[0, 1], [2]]) is None and again.state()["nodes"] == [0, 1]
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(UsageError, match="auto, library, direct, hierarchical"):
        again.setting()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("record")
    run_ranks(3, PROGRAM.format(path=found), cwd=found).check()
    return found


def record(path, name):
    told = json.loads((path / name / "run.json").read_text())["allreduce"]
    rows = [json.loads(line) for line in (path / name / "metrics.jsonl").read_text().splitlines()]
    events = [row for row in rows if row["event"] == "allreduce"]
    return told, events, [int((path / name / f"measured-{rank}").read_text()) for rank in range(3)]


def test_a_resume_takes_the_algorithm_of_the_run_whatever_it_would_measure(path):
    first, told, measured = record(path, "slow")
    assert "hierarchical" in first["chosen"].values() and measured == [1, 1, 1] and told == []
    again, told, measured = record(path, "slow-again")
    assert again == first and measured == [0, 0, 0] and told == []
    assert same_model(path / "slow" / "model.safetensors", path / "slow-again" / "model.safetensors")


def test_a_pin_wins_and_says_so_and_is_itself_kept(path):
    found, (told,), measured = record(path, "pinned")
    assert set(found["chosen"].values()) == {"library"} and measured == [0, 0, 0]
    assert told["pinned"] == "MPITRAIN_ALLREDUCE=library" and told["before"] == "auto"
    found, told, measured = record(path, "pinned-again")
    assert set(found["chosen"].values()) == {"library"} and measured == [0, 0, 0] and told == []


def test_among_ranks_that_lie_otherwise_links_are_measured_anew_and_it_is_said(path):
    found, (told,), measured = record(path, "elsewhere")
    assert measured == [1, 1, 1] and found["nodes"] == [0, 1, 2]
    assert "other nodes" in told["before"]


def test_a_split_model_keeps_it_too(path):
    found, _, measured = record(path, "shards")
    assert "hierarchical" in found["chosen"].values() and measured[0] >= 1
