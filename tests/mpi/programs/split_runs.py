"""Runs that split a model, one after the other: `split_runs.py DIRECTORY` (which: `splits.RUNS`)."""

import os
import signal
import sys
from pathlib import Path

import mpitrain as mt
from mpitrain.errors import AgreedError
from mpitrain.mpi.runtime import start
from tests.mpi import splits

directory = Path(sys.argv[1])
# ranks 0, 2, ... on one node, 1, 3, ... on another
os.environ["SLURMD_NODENAME"] = f"node{int(os.environ['OMPI_COMM_WORLD_RANK']) % 2}"
runtime = start()


def nan_at_step_1(model, batch):
    loss = splits.loss(model, batch)
    return loss * float("nan") if runtime.step == 1 and runtime.rank == 1 else loss


def signal_at_step_1(model, batch):
    if runtime.step == 1 and runtime.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return splits.loss(model, batch)


LOSSES = {"nan": nan_at_step_1, "signal": signal_at_step_1}

for name, (strategy, changes) in splits.RUNS[runtime.size].items():
    job = splits.character_job(directory) if name.startswith("charnn") else splits.deep_job()
    if "loss" in changes:
        changes = changes | {"loss": LOSSES[changes["loss"]]}
    try:
        mt.train(splits.changed(job, **changes), strategy, run_dir=str(directory / name), quiet=True)
    except AgreedError as error:
        if runtime.rank == 0:
            (directory / f"{name}.refused").write_text(str(error))
