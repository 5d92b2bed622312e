"""Golden runs over MPI, one after the other: `golden_runs.py FILE`, JSON of (fields of the run, source, folder)."""

import json
import sys
from pathlib import Path

from mpitrain.mpi.runtime import start
from tests.golden.runs import Run
from tests.golden.worlds import lay_checkpoint, train

runtime = start()
for fields, source, folder in json.loads(Path(sys.argv[1]).read_text()):
    run, there = Run(**fields), True
    if source:
        there = runtime.broadcast(lay_checkpoint(Path(source), Path(folder)) if runtime.rank == 0 else None)
    if there:
        train(run, source, folder)
    runtime.barrier()
    if runtime.rank == 0:
        print("golden run ended", flush=True)
