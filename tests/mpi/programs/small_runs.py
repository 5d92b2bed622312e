"""Small jobs, one after the other: `small_runs.py DIRECTORY JSON`, JSON of run -> (job, strategy, batch size)."""

import json
import sys
from pathlib import Path

import mpitrain as mt
from mpitrain.strategies.base import Strategy
from mpitrain.values import parse
from tests import small_jobs

for name, (job, text, batch_size) in json.loads(sys.argv[2]).items():
    strategy = parse(text, "strategy")
    assert isinstance(strategy, Strategy)
    mt.train(small_jobs.job(job, batch_size), strategy, run_dir=str(Path(sys.argv[1]) / name), quiet=True)
