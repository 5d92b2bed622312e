"""`mpitrain predict`: what a trained model says of the samples of a set."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from mpitrain.cli.common.options import command, option, switch
from mpitrain.cli.common.ranks import with_ranks
from mpitrain.system.number_texts import positive
from mpitrain.system.saying import say

_DESCRIPTION = """\
Apply the model of a finished run to every sample of a set of shards or of a
dataset, alone or with the other ranks of a launch, and write one HDF5 file. Row
i belongs to sample i in the order of the set. The job's predict function says
what is computed; without one it is what the model returns for the array x."""

_EPILOG = """\
examples:
  mpitrain predict runs/mine "data/mine/validate-*.h5" -o predictions.h5
  mpitrain predict runs/mine my_job.py:test_set -o predictions.h5
  mpitrain launch -n 8 predict runs/mine data/new -o predictions.h5"""


def add_parser(commands: Any) -> None:
    """Add `predict` to the command's subparsers."""
    parser = command(commands, "predict", "apply a trained model", run_predict, _DESCRIPTION, _EPILOG)
    option(parser, "run_dir", "RUN_DIR", "of the finished run")
    option(
        parser,
        "data",
        "DATA",
        "shards: a file, a folder, or a pattern in quotes; or a dataset of Python: FILE.py:NAME, MODULE:NAME",
    )
    option(parser, "-o --out", "FILE", "the HDF5 file to write", required=True)
    switch(parser, "--overwrite", "replace FILE if it exists")
    option(parser, "--job", "JOB", "job file, where the run's own has moved or does not say what to predict")
    option(
        parser, "--which", "NAME",
        "which of the run's models: last (the default), best or ema",
        default="last",
    )  # fmt: skip
    option(
        parser, "--batch-size", "N",
        "samples that are computed at once (default: the job's, and at least 256)",
        positive,
    )  # fmt: skip


@with_ranks
def run_predict(arguments: argparse.Namespace, ranks: Any) -> None:
    """Predict; rank 0 prints what the file holds."""
    from mpitrain.data.write.progress import Pace
    from mpitrain.reporting.console import Console
    from mpitrain.training.trained.predict import predict

    console = Console(sys.stderr, quiet=ranks.rank != 0)
    try:
        done = predict(
            arguments.run_dir,
            arguments.data,
            arguments.out,
            job=arguments.job,
            which=arguments.which,
            batch_size=arguments.batch_size,
            overwrite=arguments.overwrite,
            ranks=ranks,
            progress=Pace(console, "predicting", "samples", ranks.size),
        )
    finally:
        console.clear()
    if ranks.rank == 0:
        say(f"{arguments.out}: {done.num_samples} samples: {', '.join(done.arrays)}")
