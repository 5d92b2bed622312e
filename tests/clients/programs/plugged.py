"""What the programs share that train under a strategy from inside a framework: model, data, and what they print.

Each is started with a list of runs, and prints for each of them, on every worker, what it saw at every step (samples by
micro-batch, rate, the servers' versions before and after it) and the final parameters.
"""

import json
import os
import sys
from typing import Any

import torch
from torch import nn

from mpitrain.wrapping import loop
from mpitrain.wrapping.membership import join

EPOCHS, STEPS, PARTS, BATCH, CLIP = 2, 3, 2, 4, 0.3  # steps of an epoch, micro-batches of a step


def build_model():
    """The same on every rank that trains; the first rank's is what counts."""
    torch.manual_seed(5)
    layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    return layers.double()


def build_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


class Data(torch.utils.data.Dataset[Any]):
    """Samples (inputs, wanted, number); as many as `workers` read in an epoch."""

    def __init__(self, workers):
        generator = torch.Generator().manual_seed(7)
        count = STEPS * PARTS * BATCH * workers
        self.inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
        self.wanted = self.inputs.square().sum(1, keepdim=True).sqrt()

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, number):
        return self.inputs[number], self.wanted[number], number


def mean_loss(model, inputs, wanted):
    return nn.functional.mse_loss(model(inputs), wanted)


class Record:
    """Of one run on this rank, which may fail on the second worker after a step."""

    def __init__(self, run):
        self._fails = "fails" in run and os.environ["RANK"] == "1"
        self.rows, self._parts, self._began = [], [], None

    def saw(self, numbers):
        """Before the loss of a micro-batch."""
        if self._fails and self.rows:
            raise ValueError("on purpose")
        if not self._parts:
            self._began = _version()
        self._parts.append(numbers.tolist())

    def stepped(self, rate):
        """After a step that was taken at this rate."""
        row = {"samples": self._parts, "rate": rate, "version": _version(), "began": self._began}
        self.rows.append(row)
        self._parts = []

    def show(self, run, model, rank, workers, **more):
        final = [number for one in model.parameters() for number in one.detach().flatten().tolist()]
        told = {"run": run["name"], "rank": rank, "workers": workers, "rows": self.rows, "final": final}
        print("RUN " + json.dumps(told | more), flush=True)


def _version():
    """Of the servers' parameters that this worker has read after its last push; None without servers."""
    joined = loop._wrapped.optimizers if loop._wrapped is not None else []
    worker = getattr(joined[0], "_worker", None) if joined else None
    return None if worker is None else worker.versions[0]


def runs():
    """What the command line asks for."""
    return json.loads(sys.argv[1])


def workers_of(run):
    """How many workers train, as `Data` wants to know before a framework does."""
    return join("allreduce()" if run.get("plain") else run["strategy"]).num_workers
