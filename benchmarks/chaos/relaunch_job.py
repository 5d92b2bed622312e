"""The job that `chaos_relaunch.py` kills a rank of, once, while a checkpoint is being written.

Sample i moves weight i and no other, by the same dyadic amount each time, so without momentum the final weights count
how often each sample was taken, exactly. What is killed when is told by the environment:

    CHAOS_DIR       where ranks note what they do
    CHAOS_VICTIM    rank that kills itself by SIGKILL
    CHAOS_PART      the part of a checkpoint during whose writing it does so
    CHAOS_WRITE     which write of that part: the first from this one on that finds a complete checkpoint before it
    CHAOS_AFTER_S   seconds after that write has begun
"""

import os
import signal
import threading
import time
from pathlib import Path

import torch
from indices import Indices
from measuring.launching import note
from torch import nn

import mpitrain as mt
from mpitrain.checkpoint import CheckpointWriter
from mpitrain.checkpoint.parts import listed, verify
from mpitrain.errors import CheckpointError
from mpitrain.system.launched.launch_variables import launched_rank

NUM_SAMPLES, EPOCHS, BATCH_SIZE, RATE = 512, 4, 8, 2.0**-10
NUM_WEIGHTS = 1_000_000  # what a checkpoint holds besides: enough for its writing to take a while
HOLDS_AFTER = 60  # of a worker's 128 batches: the victim is still to die
NOTES = Path(os.environ["CHAOS_DIR"])
FIRED, KILLED = NOTES / "fired", NOTES / "killed"


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUM_WEIGHTS))

    def forward(self, index):
        return self.weight[index].sum()


calls = []


def loss(model, batch):
    calls.append(1)
    if len(calls) == 1 and KILLED.exists():
        note(NOTES, "resumed", at_s=time.monotonic())
    while FIRED.exists() and not KILLED.exists() and len(calls) > HOLDS_AFTER:
        time.sleep(0.001)
    return model(batch["index"])


def is_complete(folder):
    try:
        return bool(verify(folder))
    except CheckpointError:
        return False


def noted_write(self, mark, state, parts, write=CheckpointWriter._write):
    wanted = self.plan.part == os.environ.get("CHAOS_PART") and self._num_begun >= int(
        os.environ["CHAOS_WRITE"]
    )
    if wanted and not FIRED.exists() and any(is_complete(folder) for folder in listed(self.plan.run_dir)):
        firing = NOTES / "firing"
        firing.write_text(str(mark))
        firing.rename(FIRED)
    write(self, mark, state, parts)


def die_when_due():
    while not FIRED.exists():
        time.sleep(0.0005)
    time.sleep(float(os.environ["CHAOS_AFTER_S"]))
    note(NOTES, "killed", at_s=time.monotonic())
    KILLED.touch()
    os.kill(os.getpid(), signal.SIGKILL)


if (rank := launched_rank()) is not None:
    note(NOTES, "started", pid=os.getpid())
    CheckpointWriter._write = noted_write
    if rank == int(os.environ.get("CHAOS_VICTIM", "-1")) and not FIRED.exists():
        threading.Thread(target=die_when_due, daemon=True).start()

job = mt.Job(
    model=Counts,
    loss=loss,
    optimizer=lambda parameters: torch.optim.SGD(
        parameters, lr=RATE, momentum=float(os.environ.get("CHAOS_MOMENTUM", "0"))
    ),
    data=Indices(NUM_SAMPLES),
    epochs=EPOCHS,
    batch_size=BATCH_SIZE,
    checkpoint_every=str(NUM_SAMPLES // 4),
)
