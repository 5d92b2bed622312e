"""Runs whose steps are traced: `trace_runs.py DIRECTORY JSON`, JSON of name -> (strategy, fields of the job).

A step takes some milliseconds, so that what lies between spans weighs little. Before the runs the clocks are measured.
"""

import json
import sys
from pathlib import Path

from torch import nn

import mpitrain as mt
from mpitrain.mpi.clock import measure_offset
from mpitrain.mpi.runtime import start
from mpitrain.strategies.base import Strategy
from mpitrain.values import parse
from tests import toy

runtime = start()
offset_s, uncertainty_s = measure_offset(runtime, within_nodes=True)
print(json.dumps({"offset": [runtime.rank, offset_s, uncertainty_s]}))


def deep():
    return nn.Sequential(nn.Linear(5, 700), nn.Tanh(), nn.Linear(700, 700), nn.Tanh(), nn.Linear(700, 1))


for name, (text, fields) in json.loads(sys.argv[2]).items():
    strategy = parse(text, "strategy")
    assert isinstance(strategy, Strategy)
    job = toy.make_job(model=deep, batch_size=64, data=toy.Memory(768), **{"trace": "steps=2:8"} | fields)
    mt.train(job, strategy, run_dir=str(Path(sys.argv[1]) / name), quiet=True)
