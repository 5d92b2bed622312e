"""A job whose third rank kills itself in the first two starts; what it did stands in the working directory."""

import os
import signal
from pathlib import Path

from mpitrain.system.launched.launch_variables import launched_rank
from tests import toy

calls: list[int] = []


def loss(model, batch):
    calls.append(1)
    if launched_rank() == 2 and len(calls) == 12 and not Path("second").exists():
        Path("second" if Path("first").exists() else "first").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return toy.square_loss(model, batch)


job = toy.make_job(epochs=10, batch_size=4, loss=loss, checkpoint_every="40")
