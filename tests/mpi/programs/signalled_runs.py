"""Runs, some of which a signal tells to end."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

import mpitrain as mt
from mpitrain.mpi.runtime import start
from mpitrain.training import signals
from mpitrain.values import parse
from tests import toy
from tests.mpi.cases import run_calls

runtime, path = start(), Path(sys.argv[1])
signal.signal(
    signal.SIGUSR1, signal.SIG_IGN
)  # what mpirun hands on may come to a rank whose run is already over


def mpirun():
    """Its process number, by which Open MPI names a launch: a warm rank has another parent."""
    return int(os.environ["PMIX_NAMESPACE"].split("@")[0].rpartition("-")[2])


def signal_when_waiting(number, told):
    while not runtime.engine.arriving:  # in a collective, and somebody has not come there
        time.sleep(0.001)
    os.kill(os.getpid(), number)
    told.touch()


def run(name, text, resume=None, victim=-1, how=""):
    calls = []
    number, _, where = how.partition(" ")
    told = path / f"told-{name}"

    def loss(model, batch):
        calls.append(1)
        if len(calls) == 7 and runtime.rank == victim and where == "waiting":
            threading.Thread(target=signal_when_waiting, args=(getattr(signal, number), told)).start()
        elif len(calls) == 7 and runtime.rank == victim:
            os.kill(mpirun() if where == "mpirun" else os.getpid(), getattr(signal, number))
            while not signals.asked():  # mpirun hands it on when it gets a core
                time.sleep(0.001)
        while len(calls) == 7 and runtime.rank == 0 and where == "waiting" and not told.exists():
            time.sleep(0.001)
        return toy.square_loss(model, batch)

    def calm(parameters):
        return torch.optim.SGD(parameters, lr=0.002)

    job = toy.make_job(
        epochs=40,
        batch_size=4,
        loss=loss,
        optimizer=calm,
        checkpoint_every="never",
        data=toy.Memory(window_samples=4),  # 12 windows, of which each worker has its own
    )
    result = mt.train(job, parse(text, "strategy"), run_dir=str(path / name), quiet=True, resume=resume)
    return result["exit_code"]


sys.exit(run_calls(globals()))
