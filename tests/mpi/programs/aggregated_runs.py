"""Runs on two nodes with an aggregator each; ranks say where they are. Arguments: a folder, perhaps "short"."""

import os
import signal
import sys
from pathlib import Path

from mpitrain.system.launched.launch_variables import launched_rank

NODES = "aaaabbb"
os.environ["SLURMD_NODENAME"] = NODES[launched_rank()]
import mpitrain as mt  # noqa: E402
from mpitrain.checkpoint.parts import newest  # noqa: E402
from mpitrain.mpi.runtime import start  # noqa: E402
from mpitrain.values import parse  # noqa: E402
from tests import toy  # noqa: E402

runtime, path = start(), Path(sys.argv[1])
PROCESSES = runtime.broadcast(runtime.gather(os.getpid()))
assert PROCESSES is not None


def train(name, text, **changes):
    options = {key: changes.pop(key) for key in ("resume",) if key in changes}
    job = toy.make_job(**changes)
    return mt.train(job, parse(text, "strategy"), run_dir=str(path / name), quiet=True, **options)


def until_asked(victim):
    """The loss, which sends USR1 to the rank `victim` in the seventh batch of rank 0."""
    calls = []

    def loss(model, batch):
        calls.append(1)
        if len(calls) == 7 and runtime.rank == 0:
            os.kill(PROCESSES[victim], signal.SIGUSR1)
        return toy.square_loss(model, batch)

    return loss


for index, changes in enumerate(toy.DYADIC.values()):
    train(f"sync-{index}", "sync(aggregate='node')", **changes, epochs=1, batch_size=4)
train("async", "async(aggregate='node')", epochs=5)
train(
    "softsync", "softsync(updates=3,aggregate='node',reply_wire='float16')", epochs=3, validate=toy.Memory(24)
)
if sys.argv[2:] == ["short"]:
    runtime.finish()
    sys.exit()

LINEAR = {"model": toy.linear_float32, "loss": toy.linear_loss, "optimizer": toy.dyadic_sgd, "batch_size": 4}
train("whole", "sync(servers=3)", **LINEAR, epochs=6)
for name, first, then in (
    ("to-summed", "sync(servers=3)", "sync(aggregate='node')"),
    ("to-direct", "sync(aggregate='node')", "sync(servers=3)"),
):
    train(f"{name}-begun", first, **LINEAR, epochs=3, checkpoint_every="48")
    train(name, then, **LINEAR, epochs=6, checkpoint_every="never", resume=str(path / f"{name}-begun"))

calm = {"optimizer": toy.adam, "epochs": 40, "batch_size": 4, "checkpoint_every": "never"}
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
for victim in (2, 4):  # an aggregator, and a worker
    name = f"asked-{victim}"
    train(name, "sync(aggregate='node')", **calm, loss=until_asked(victim))
# to the end of the epoch after the next, from wherever the request has found the run
done = runtime.broadcast(newest(path / "asked-2").num_samples() if runtime.rank == 0 else None)
calm["epochs"] = done // 48 + 2
train("asked-2", "async(aggregate='node')", **calm, resume="auto")
