"""The job that `memory.py` trains: a perceptron whose ranks may use a third of what the whole model needs.

Environment: MEMORY_FOLDER, where ranks note their sizes; MEMORY_WIDTH and MEMORY_BLOCKS of the model; MEMORY_DIVISOR of
what it needs.
"""

import atexit
import os
import resource
import threading
import time
from functools import partial
from pathlib import Path

import torch
from measuring.launching import note
from torch import nn

import mpitrain as mt

FOLDER = Path(os.environ.get("MEMORY_FOLDER", "."))
WIDTH, BLOCKS = int(os.environ.get("MEMORY_WIDTH", "768")), int(os.environ.get("MEMORY_BLOCKS", "32"))
DIVISOR = float(os.environ.get("MEMORY_DIVISOR", "3"))
NUM_PARAMETERS = BLOCKS * (8 * WIDTH * WIDTH + 5 * WIDTH)
NEEDED_BYTES = 4 * 4 * NUM_PARAMETERS  # parameters, gradients and Adam's two moments, in float32
SAMPLE_S = 0.01


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Size:
    """What this process has of private memory that it may write to (which RLIMIT_DATA limits), and its largest."""

    def __init__(self):
        self.before = self.largest = self.now()
        self.resident = status("VmHWM")

    @staticmethod
    def now():
        return status("VmData")

    def watch(self):
        while True:
            self.largest = max(self.largest, self.now())
            time.sleep(SAMPLE_S)

    def tell(self):
        largest = max(self.largest, self.now())
        sizes = {"before": self.before, "more": largest - self.before}
        note(FOLDER, "sizes", **sizes, resident_before=self.resident, resident=status("VmHWM"))


def status(name):
    """One of the sizes in /proc/self/status, in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))


def model():
    """Limits this rank to its size now and the allowed part of what the whole model needs, and makes the model."""
    if resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY and DIVISOR:
        size = Size()
        limit = size.before + int(NEEDED_BYTES / DIVISOR)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        threading.Thread(target=size.watch, daemon=True).start()
        atexit.register(size.tell)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def loss(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


job = mt.Job(
    model=model,
    loss=loss,
    optimizer=partial(torch.optim.Adam, lr=1e-4),
    data=mt.Synthetic(1024, x=((WIDTH,), "float32"), y=((WIDTH,), "float32")),
    batch_size=64,
    epochs=1,
    tensor_plan={"*.up": "column", "*.down": "row"},
)
