"""Runs with ordered stragglers, all cases in one launch.

`updates` notes for every update how many gradients it is the mean of and how many workers took part then.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import mpitrain as mt
from mpitrain.errors import AgreedError
from mpitrain.model import ShardStore
from mpitrain.mpi.runtime import start
from mpitrain.roles import Server
from tests import toy

path = Path(sys.argv[1])
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
    active.append(len(self.table.active))
    return carry_out(self, verdict)


ShardStore.add, ShardStore.apply, Server._carry_out = counting_add, counting_apply, noting_carry_out


def run(name, strategy, inject=(), **changes):
    updates.clear()
    mt.train(toy.make_job(**changes), strategy, run_dir=str(path / name), quiet=True, inject=inject)
    if runtime.rank == 0:
        (path / name / "updates.json").write_text(json.dumps(updates))


run("backup", mt.Backup(spare=1), "slow(worker=2, factor=30)", epochs=16)
run("pause", mt.Async(), "pause(worker=1, at_step=3, seconds=3)", epochs=8)
run("stall", mt.Sync(), ("stall(worker=0, chance=0.3, seconds=0.05)", "stall(3, 0.6, 0.01)"), epochs=6)

changes: dict[str, Any] = dict(**toy.DYADIC["linear in float32"], epochs=2, batch_size=2)
run("plain", mt.AllReduce(), **changes)
slowed = ("slow(worker=4, factor=20)", "pause(worker=0, at_step=2, seconds=0.5)", "slow(worker=1, factor=3)")
run("slowed", mt.AllReduce(), slowed, **changes)
stalled: dict[str, Any] = dict(**changes, validate=toy.Memory(40), validate_every="5 samples")
run("validated", mt.AllReduce(), "stall(worker=4, chance=1, seconds=0.1)", **stalled)

for name, inject in {
    "no such worker": "slow(worker=4, factor=2)",
    "unreadable": "slow(worker=1; factor=2)",
    "different": f"slow(worker=1, factor={runtime.rank + 2})",
}.items():
    with contextlib.suppress(AgreedError):
        mt.train(toy.make_job(), mt.Async(), run_dir=str(path / name), quiet=True, inject=inject)
        raise SystemExit(f"{inject} was accepted")
