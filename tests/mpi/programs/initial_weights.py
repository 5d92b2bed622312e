"""Runs that start from a file of weights, under every strategy.

Arguments: a folder; the job file. Rank 0 writes `found.json`: by strategy, which tensors of the trained model are those
of the file, after steps at a rate of zero and after steps at the job's own.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.errors import AgreedError
from mpitrain.mpi.runtime import start
from mpitrain.training.job_file import load_job
from tests.mpi.start_files import STRATEGIES

runtime = start()
root, job = Path(sys.argv[1]), load_job(sys.argv[2])
weights = load_file(root / "start.safetensors")
found: dict[str, Any] = {}
for number, strategy in enumerate(STRATEGIES):
    found[strategy] = {}
    for lr in (0.0, None):
        path = root / f"run-{number}-{lr}"

        mt.train(
            job, run_dir=str(path), quiet=True, strategy=strategy, lr=lr, init=str(root / "start.safetensors")
        )
        if runtime.rank == 0:
            trained = load_file(path / "model.safetensors")
            assert trained.keys() == weights.keys()
            found[strategy][str(lr)] = [n for n, one in trained.items() if torch.equal(one, weights[n])]
try:
    mt.train(job, run_dir=str(root / "refused"), quiet=True, init=str(root / "other.safetensors"))
except AgreedError as error:
    found["refused"] = [error.exit_code, str(error)]
if runtime.rank == 0:
    (root / "found.json").write_text(json.dumps(found))
runtime.finish()
