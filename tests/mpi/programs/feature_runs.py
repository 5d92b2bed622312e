"""Runs, one after the other: `feature_runs.py DIRECTORY JSON`, JSON of name -> (strategy, fields of the job).

The job is `splits.deep_job()`, whose global batch is the same on any number of ranks; cells of the table are trained in
float32, which codecs need.
"""

import json
import sys
from pathlib import Path

import mpitrain as mt
from mpitrain.mpi.runtime import start
from mpitrain.strategies.base import Strategy
from mpitrain.values import parse
from tests import toy
from tests.mpi import splits

runtime = start()
FLOAT32 = {"model": lambda: splits.Deep().float(), "loss": toy.square_loss}
for name, (text, fields) in json.loads(sys.argv[2]).items():
    strategy = parse(text, "strategy")
    assert isinstance(strategy, Strategy)
    batch_size = splits.BATCH // strategy.num_replicas(runtime.size - strategy.num_servers())
    if name.startswith("cell"):
        fields = FLOAT32 | fields
    else:
        batch_size //= fields.get("accumulate", 1)
        fields |= {"loss": splits.weighted_loss} if "loss" in fields else {}
    job = splits.changed(splits.deep_job(), batch_size=batch_size, **toy.scheduled(fields))
    mt.train(job, strategy, run_dir=str(Path(sys.argv[1]) / name), quiet=True)
