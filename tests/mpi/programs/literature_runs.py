"""Every job of the literature by every strategy, one after the other: `literature_runs.py DIRECTORY`."""

import sys
from pathlib import Path

import mpitrain as mt
from mpitrain.mpi.runtime import start
from mpitrain.values import parse
from tests.mpi import literature

start()
for name in literature.NAMES:
    for text in literature.STRATEGIES:
        options = literature.options(Path(sys.argv[1]), name, text)
        mt.train(literature.job_of(name), parse(text, "strategy"), **options)
