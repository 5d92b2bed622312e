"""Pairs of features, one after the other: `pair_runs.py FOLDER NUMBER...`, numbers of `tests/pairs.py`."""

import json
import sys
from pathlib import Path
from typing import Any

import mpitrain as mt
from mpitrain.errors import AgreedError
from mpitrain.mpi.runtime import start
from mpitrain.values import parse
from tests import pairs

runtime = start()
folder = Path(sys.argv[1])
for number in map(int, sys.argv[2:]):
    one = pairs.pair(number)
    strategy: Any = parse(one.text, "strategy")
    run_dir = folder / f"run-{number}"
    told = ""
    try:
        init = folder / f"init-{number}.safetensors"
        try:
            job = pairs.make_job(one, init) if runtime.rank == 0 else None
        finally:
            runtime.barrier()
        job = job or pairs.make_job(one, init)  # with the first rank's weights
        mt.train(job, strategy, run_dir=str(run_dir), quiet=True)
    except AgreedError as error:
        told = pairs.refused(error) if error.exit_code == 2 else f"FAILED: {error}"
    except mt.errors.UsageError as error:
        told = pairs.refused(error)
    if runtime.rank == 0:
        print("pair " + json.dumps([number, told or pairs.outcome(one, run_dir)]), flush=True)
