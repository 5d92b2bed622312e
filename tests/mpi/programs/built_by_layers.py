"""Runs at a rate of zero: `built_by_layers.py DIRECTORY`; what they save is what they have begun with."""

import dataclasses
import sys
from functools import partial
from pathlib import Path

import torch

import mpitrain as mt
from mpitrain.mpi.runtime import start
from tests import scarce

runtime, root = start(), Path(sys.argv[1])
begins = dataclasses.replace(
    scarce.job, model=scarce.several, optimizer=partial(torch.optim.SGD, lr=0.0), ema=0.5, data=scarce.data(32),
    batch_size=16, tensor_plan={"*.up": "column", "*.down": "row", "0": "gather"},
)  # fmt: skip
ways = {
    "sharded": mt.Sharded(), "replicas": mt.Sharded(replicas=2), "tensor": mt.TensorParallel(),
    "pipeline": mt.Pipeline(microbatches=2),
}  # fmt: skip
for name, way in ways.items():
    mt.train(begins, way, run_dir=str(root / name), quiet=True, steps=1)
    weights = str(root / "start.safetensors")
    mt.train(
        begins, way, run_dir=str(root / f"{name}-init"), quiet=True, steps=1, init=weights, init_partial=True
    )
whole = dataclasses.replace(begins, model=scarce.reading_weights)
mt.train(whole, mt.Sharded(), run_dir=str(root / "whole"), quiet=True, steps=1)
