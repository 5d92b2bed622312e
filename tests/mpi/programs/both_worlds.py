"""The ranks' side of `tests/threads/test_both_worlds.py`: whole runs, runs that threads go on with, and runs that go on
from what threads have written. Arguments: the folder, then strategies."""

import functools
import sys
from pathlib import Path

import mpitrain as mt
from mpitrain.mpi.runtime import start
from mpitrain.values import parse
from tests.threads.course import BEGUN, WHOLE, dyadic_job, until_complete

for index, text in enumerate(sys.argv[2:]):
    folder, strategy = f"{sys.argv[1]}/{index}", parse(text, "strategy")
    mt.train(dyadic_job(), strategy, run_dir=f"{folder}/ranks", epochs=WHOLE, quiet=True)
    begins = functools.partial(
        mt.train, dyadic_job(), strategy, run_dir=f"{folder}/ranks-begin", epochs=BEGUN, quiet=True
    )
    until_complete(begins, Path(f"{folder}/ranks-begin"), start().broadcast)
    begun = f"{folder}/threads-begin"
    mt.train(dyadic_job(), strategy, run_dir=f"{folder}/ranks-end", epochs=WHOLE, resume=begun, quiet=True)
