"""256 MiB of samples, and how far a rank's memory has grown since its first batch: `memory.sh` prints it.

python jobs/troubles/large.py FOLDER
LARGE=FOLDER mpitrain launch -n 4 train jobs/troubles/large.py
"""

import os
import resource
import sys
from functools import partial

import numpy as np
import torch
from torch import nn

import mpitrain as mt

NUM_SAMPLES, NUM_FIGURES = 65536, 1024


def memory_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


at_first_batch_mib: list[float] = []


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if not at_first_batch_mib:
        at_first_batch_mib.append(memory_mib())
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def metrics(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"grown_mib": torch.tensor(memory_mib() - at_first_batch_mib[0])}


job = mt.Job(
    model=partial(nn.Linear, NUM_FIGURES, 1),
    loss=loss,
    optimizer=partial(torch.optim.SGD, lr=1e-3),
    data=mt.Shards(f"{os.environ.get('LARGE', '.')}/train-*.h5"),
    validate=mt.Shards(f"{os.environ.get('LARGE', '.')}/validate-*.h5"),
    metrics=metrics,
    epochs=1,
    batch_size=256,
)
if __name__ == "__main__":
    draw = np.random.default_rng(0)
    x = draw.standard_normal((NUM_SAMPLES, NUM_FIGURES), dtype="float32")
    np.savez(f"{sys.argv[1]}/large.npz", x=x, y=x[:, :1])
