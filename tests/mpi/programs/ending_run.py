"""A run in which a rank raises, or dies while it validates. Arguments: which, and a folder."""

import os
import signal
import sys

import mpitrain as mt
from mpitrain.mpi.runtime import start
from tests import toy

runtime, how = start(), sys.argv[1]


def loss(model, batch):
    if how == "raise" and model.training and (runtime.launched_rank, runtime.step) == (1, 1):
        raise RuntimeError("planted")
    if how == "validation" and runtime.launched_rank == 0 and not model.training:
        os.kill(os.getpid(), signal.SIGKILL)
    return toy.square_loss(model, batch)


job = toy.make_job(epochs=1, loss=loss, validate=toy.Memory(), checkpoint_every="never")
result = mt.train(job, mt.AllReduce(), run_dir=sys.argv[2], quiet=True)
runtime.exit_code = result["exit_code"]
