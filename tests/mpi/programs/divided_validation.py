"""Validations that all ranks compute: `divided_validation.py DIRECTORY HOW JSON`, JSON of the strategies.

HOW is "whole", or which rank dies in its first batch of the validation under each: "1". Who has measured what is left
in `measured-RANK.json` of each run's folder.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

import mpitrain as mt
from mpitrain.mpi.runtime import start
from mpitrain.values import parse
from tests import toy

runtime = start()
root, how, strategies = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
SET = toy.Memory(2100)  # nine batches
measured: list[int] = []


def loss(model, batch):
    if not torch.is_grad_enabled():
        if how == str(runtime.launched_rank):
            os.kill(os.getpid(), signal.SIGKILL)
        measured.append(len(batch["x"]))
    return toy.square_loss(model, batch)


def ordered(predictions, targets):
    same = torch.equal(targets.flatten(), toy.MemoryReader(SET).y.flatten())
    return {"middle": predictions.median(), "same": float(same)}


for number, strategy in enumerate(strategies):
    measured.clear()
    folder = root / str(number)
    job = mt.Job(
        model=toy.three_layers if strategy.startswith("tensor") else toy.normed,
        loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.01), data=toy.Memory(96), validate=SET, epochs=2,
        batch_size=4, metrics=mt.Collected(ordered), keep_best="validation_loss", ema=0.5, validate_ema=True,
        tensor_plan={"0": "column", "2": "row"}, checkpoint_every="never",
    )  # fmt: skip
    result = mt.train(job, parse(strategy, "strategy"), run_dir=str(folder), quiet=True)
    (folder / f"measured-{runtime.launched_rank}.json").write_text(json.dumps(measured))
    runtime.exit_code = result["exit_code"]
