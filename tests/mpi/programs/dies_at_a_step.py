"""A job file whose only rank kills itself once, in its 11th batch, when 10 steps and a checkpoint of 8 are on disk. The
file CALLS has a byte for each batch that was begun."""

import os
import signal
import time
from pathlib import Path

from mpitrain.system.files.run_directory import progress
from mpitrain.system.time_spent import read_spent
from tests import toy

RUN, CALLS, DIED = Path("run"), Path("calls"), Path("died")


def loss(model, batch):
    with CALLS.open("ab") as file:
        file.write(b".")
    if CALLS.stat().st_size == 11 and not DIED.exists():
        while progress(RUN).samples < 64 or read_spent(RUN)[-1].samples < 80:
            time.sleep(0.01)
        DIED.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    return toy.square_loss(model, batch)


job = toy.make_job(loss=loss, epochs=8, batch_size=8, checkpoint_every="32", keep_checkpoints=20)
