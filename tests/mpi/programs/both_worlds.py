"""The ranks' side of `tests/threads/test_both_worlds.py`: whole runs, runs that threads go on with, and runs that go on
from what threads have written. Arguments: the folder, then strategies, with what their jobs are of."""

import functools
import sys
from pathlib import Path

import mpitrain as mt
from mpitrain.mpi.runtime import start
from tests.threads.course import BEGUN, WHOLE, dyadic_job, strategy_of, until_complete

for index, text in enumerate(sys.argv[2:]):
    folder, strategy, job = f"{sys.argv[1]}/{index}", strategy_of(text), dyadic_job(text)
    mt.train(job, strategy, run_dir=f"{folder}/ranks", epochs=WHOLE, quiet=True)
    begins = functools.partial(
        mt.train, job, strategy, run_dir=f"{folder}/ranks-begin", epochs=BEGUN, quiet=True
    )
    until_complete(begins, Path(f"{folder}/ranks-begin"), start().broadcast)
    begun = f"{folder}/threads-begin"
    mt.train(job, strategy, run_dir=f"{folder}/ranks-end", epochs=WHOLE, resume=begun, quiet=True)
