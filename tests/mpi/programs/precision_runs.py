"""jobs/charnn.py, made small by the environment, in 32-bit and 16-bit numbers: `precision_runs.py DIRECTORY`, which
holds some topics."""

import sys
from pathlib import Path

import mpitrain as mt
from mpitrain.mpi.runtime import start
from tests.mpi import splits

start()
path = Path(sys.argv[1])
for precision in ("float32", "bfloat16"):
    job = splits.small_character_job(path, precision=precision)
    mt.train(job, mt.AllReduce(), run_dir=str(path / precision), quiet=True)
