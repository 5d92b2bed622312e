"""The job of which `chaos_counting.py` kills ranks: its weights count how often every sample was used.

Row i of the weights belongs to sample i. The optimizer adds 1 wherever there is a gradient, so a row adds up to the
number of updates that sample i was in. Each batch uses one of several columns, drawn anew at every call: two gradients
of one sample in the same update are told apart, unless they have drawn the same column.

    COUNTING_KIND       "rows" as above, or "layers": a model that pipelines and tensor parallelism can split
    COUNTING_SLEEP_S    of every batch, so that there is a middle to be killed in
"""

import os
import random
import time

import torch
from indices import Indices
from torch import nn

import mpitrain as mt

NUM_SAMPLES, NUM_COLUMNS, EPOCHS, BATCH_SIZE = 240, 16, 3, 4
SLEEP_S = float(os.environ.get("COUNTING_SLEEP_S", "0.1"))
draw = random.Random(os.urandom(8))


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(NUM_SAMPLES, NUM_COLUMNS))

    def forward(self, index):
        return self.rows[index, draw.randrange(NUM_COLUMNS)].sum()


class Counter(torch.optim.Optimizer):
    """Adds 1 wherever there is a gradient."""

    elementwise = True

    def __init__(self, parameters, lr=1.0):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_((parameter.grad != 0).to(parameter.dtype))


def count_loss(model, batch):
    time.sleep(SLEEP_S)
    return model(batch["index"])


def layers():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def layers_loss(model, batch):
    time.sleep(SLEEP_S)
    return model(batch["x"]).square().mean()


KINDS = {
    "rows": {"model": Rows, "loss": count_loss, "optimizer": Counter},
    "layers": {
        "model": layers,
        "loss": layers_loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.5),
        "tensor_plan": {"0": "column", "2": "row"},
    },
}
job = mt.Job(
    **KINDS[os.environ.get("COUNTING_KIND", "rows")],
    data=Indices(NUM_SAMPLES, with_inputs=True),
    epochs=EPOCHS,
    batch_size=BATCH_SIZE,
    checkpoint_every=str(NUM_SAMPLES // 4),
)
