"""Ordered stragglers over real ranks: who contributes is exact, a sleeper leaves the core and hears messages."""

import json

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from tests import toy
from tests.ranks import run_ranks

# One launch carries all cases. `updates` notes for every update how many gradients it is the mean of and how
# many workers took part then.
PROGRAM = """
import contextlib, json, sys, time
from pathlib import Path

import mpitrain as mt
from mpitrain.errors import AgreedError
from mpitrain.model import ShardStore
from mpitrain.mpi.runtime import start
from mpitrain.roles import Server
from tests import toy

path = Path("{path}")
runtime = start()
updates, added, active = [], [], []
apply, add, carry_out = ShardStore.apply, ShardStore.add, Server._carry_out

def counting_add(self, worker, *arguments):
    added.append(worker)
    add(self, worker, *arguments)

def counting_apply(self):
    updates.append((len(set(added)), len(added), active[-1]))
    added.clear()
    apply(self)

def noting_carry_out(self, verdict):
    active.append(len(self.active))
    return carry_out(self, verdict)

ShardStore.add, ShardStore.apply, Server._carry_out = counting_add, counting_apply, noting_carry_out

def run(name, strategy, inject=(), **changes):
    updates.clear()
    mt.train(toy.make_job(**changes), strategy, run_dir=str(path / name), quiet=True, inject=inject)
    if runtime.rank == 0:
        (path / name / "updates.json").write_text(json.dumps(updates))

run("backup", mt.Backup(spare=1), "slow(worker=2, factor=30)", epochs=40)
run("pause", mt.Async(), "pause(worker=1, at_step=3, seconds=3)", epochs=8)
run("stall", mt.Sync(), ("stall(worker=0, chance=0.3, seconds=0.05)", "stall(3, 0.6, 0.01)"), epochs=6)

changes = dict(**toy.DYADIC["linear in float32"], epochs=2, batch_size=2)
run("plain", mt.AllReduce(), **changes)
slowed = ("slow(worker=4, factor=20)", "pause(worker=0, at_step=2, seconds=0.5)", "slow(worker=1, factor=3)")
run("slowed", mt.AllReduce(), slowed, **changes)

for name, inject in {{
    "no such worker": "slow(worker=4, factor=2)",
    "unreadable": "slow(worker=1; factor=2)",
    "different": f"slow(worker=1, factor={{runtime.rank + 2}})",
}}.items():
    with contextlib.suppress(AgreedError):
        mt.train(toy.make_job(), mt.Async(), run_dir=str(path / name), quiet=True, inject=inject)
        raise SystemExit(f"{{inject}} was accepted")
"""


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    path = tmp_path_factory.mktemp("inject")
    return path, run_ranks(5, PROGRAM.format(path=path)).check()


def result_of(launch, name):
    return json.loads((launch[0] / name / "result.json").read_text())


def steps_of(result):
    return [rank["steps"] for rank in result["ranks"] if rank["role"] == "worker"]


def test_backup_averages_exactly_three_of_four_gradients_in_every_update(launch):
    result = result_of(launch, "backup")
    assert result["inject"] == ["slow(worker=2,factor=30)"]
    assert result["late"] > 0 and result["dropped"] == result["nonfinite"] == 0
    assert result["accepted"] + result["late"] == sum(steps_of(result)) == 40 * 8
    assert result["staleness_histogram"] == {"0": result["accepted"]}
    updates = json.loads((launch[0] / "backup" / "updates.json").read_text())
    assert len(updates) == result["steps"] and sum(count for _, count, _ in updates) == result["accepted"]
    whole = [(workers, count) for workers, count, active in updates if active == 4]
    assert set(whole) == {(3, 3)}
    # only when the data is out and workers have left is an update made of fewer; each holds two leases at most
    assert len(updates) - len(whole) <= 2 * 4 and 3 * len(whole) + 2 * 4 * 3 >= result["accepted"]


def test_while_one_is_paused_the_others_go_on(launch):
    result = result_of(launch, "pause")
    assert result["injected"] == [{"worker": 1, "sleeps": 1, "slept_s": 3.0}]
    steps = steps_of(result)
    # after its fourth gradient the paused worker had one lease left; the others took all there were
    assert steps[1] == 5 and sum(steps) == result["accepted"] == 8 * 8
    assert result["staleness_max"] >= 20  # updates by the others between its reading and its coming back
    left, right = result["staleness_identity"]
    assert left == right


def test_the_same_gradients_stall_in_both_worlds(launch, tmp_path):
    real = result_of(launch, "stall")
    twin = mt.simulate(
        toy.make_job(epochs=6), mt.Sync(), 4, run_dir=str(tmp_path), quiet=True, inject=real["inject"]
    )
    assert twin["injected"] == real["injected"] and sum(row["sleeps"] for row in real["injected"]) > 2
    assert steps_of(real) == [12, 12, 12, 12]


def test_allreduce_sleeps_too_and_its_bits_are_the_same(launch):
    plain, slowed = result_of(launch, "plain"), result_of(launch, "slowed")
    one, other = (load_file(result["model"]) for result in (plain, slowed))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert plain["steps"] == slowed["steps"] and plain["injected"] == []
    rows = {row["worker"]: row for row in slowed["injected"]}
    assert rows.keys() == {0, 1, 4}
    assert rows[0] == {"worker": 0, "sleeps": 1, "slept_s": 0.5}
    assert rows[1]["sleeps"] == rows[4]["sleeps"] == slowed["steps"]
    for worker, row in rows.items():
        assert slowed["ranks"][worker]["compute_s"] >= row["slept_s"]
    # rank 1 waits in its backward for the pause of rank 0 and for rank 4: what it waited is not slowed again
    assert rows[1]["slept_s"] < rows[0]["slept_s"] + rows[4]["slept_s"]


def test_a_wrong_order_is_refused_by_all_ranks_together(launch):
    told = launch[1].ranks_err[0]
    assert "there is no worker 4. This run has 4 workers, 0 to 3" in told
    assert "cannot read inject text" in told
    assert (
        "the ranks were started differently" in told
        and "inject: ['slow(worker=1,factor=2)'] on rank 0" in told
    )


SLEEPER = """
import time
from pathlib import Path

import torch

from mpitrain.effects import Kind, Message, Now, Recv, Send, Sleep
from mpitrain.model.buffers import FixedBuffer
from mpitrain.mpi.runtime import start
from mpitrain.mpi.world import MpiWorld

runtime, sent = start(), Path("{sent}")
frame = FixedBuffer(2_000_000, torch.float32)

def sleeper():
    yield Recv()
    core_s, began_s, naps = time.process_time(), (yield Now()), 0
    while naps < 4 or not sent.exists() and naps < 400:  # nothing but sleep, until all of it has left the sender
        assert (yield Sleep(0.25)) is None
        naps += 1
    slept_s, core_s = (yield Now()) - began_s, time.process_time() - core_s
    was_sent = sent.exists()
    _, message = yield Recv()
    print("naps", naps, "slept", slept_s, "core", core_s, "sent", was_sent, "bytes", message.payload.num_bytes)

def sender():
    yield Send(0, Message(Kind.JOIN))
    yield Send(0, Message(Kind.PUSH, step=1, payload=frame))

if runtime.rank == 0:
    MpiWorld(runtime.engine, (1,), lambda source, kind: frame).run(sleeper())
else:
    MpiWorld(runtime.engine, (0,), lambda source, kind: frame).run(sender())  # returns when all of it has left
    sent.touch()
"""


def test_a_sleeper_leaves_the_core_and_messages_still_arrive(tmp_path):
    out = run_ranks(2, SLEEPER.format(sent=tmp_path / "sent")).check().ranks_out[0].split()
    naps, slept_s, core_s, was_sent, num_bytes = (
        int(out[1]),
        float(out[3]),
        float(out[5]),
        out[7],
        int(out[9]),
    )
    assert slept_s >= 0.25 * naps
    assert core_s < slept_s / 2  # a wait that spins takes all of it
    assert was_sent == "True" and num_bytes > 8_000_000
