"""`mpitrain bench`: measure a job under several strategies and numbers of workers."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from mpitrain.cli.common.options import asked, command, option, switch
from mpitrain.cli.train import add_job, add_options, overrides
from mpitrain.errors import UsageError
from mpitrain.system.launched.launch_variables import why_no_launching
from mpitrain.system.number_texts import positive, positives

_DESCRIPTION = """\
Measure a job under several strategies and numbers of workers: runs under MPI,
each as `mpitrain launch` starts it, in turns and with one seed after the other,
and runs in virtual time beside them. The table says which strategy is faster,
which reaches the target first, and which model is better."""

_EPILOG = """\
Every worker takes the job's batch, so more workers take more samples a step
(weak scaling); with --global-batch-size all workers together take that many
(strong scaling). Efficiency is a worker's samples per second over those of one
worker, or of the fewest measured, under the same strategy; measure two numbers
of workers, or there is none. Servers come on top
of the workers. A run that fails or misses the target does not end the others.

Figures of merit go to stdout, the table to stderr, and everything to bench.json
in the run directory. The exit code is 1 where a run has failed.

examples:
  mpitrain bench jobs/digits.py --strategies allreduce "async(servers=1)" \\
      "pipeline(stages=2)" --workers 2,4 --html bench.html
  mpitrain bench jobs/cnn.py --strategies allreduce --workers 1,2,4,8 \\
      --global-batch-size 128 --synthetic --train-args "--steps 200"
  mpitrain bench jobs/digits.py --strategies "sync()" "async()" --workers 1,2 \\
      --virtual-workers 8,16,64 --network "gbe10()\""""


def add_parser(commands: Any) -> None:
    """Add `bench` to the command's subparsers."""
    parser = command(
        commands,
        "bench",
        "measure a job under several strategies and numbers of workers",
        run_bench,
        _DESCRIPTION,
        _EPILOG,
    )
    add_job(parser)
    option(
        parser, "--strategies", "TEXT",
        "to measure; the others are compared with the first (default: allreduce)",
        default=["allreduce"], nargs="+",
    )  # fmt: skip
    option(
        parser, "--workers", "N,N,...",
        "workers of the runs under MPI (default: 1,2, or none beside --virtual-workers)",
        positives,
    )  # fmt: skip
    option(parser, "--virtual-workers", "N,N,...", "workers of the virtual runs", positives, ())
    option(parser, "--global-batch-size", "N", "samples of all workers and a step together", positive)
    option(parser, "--repeats", "N", "runs of each setting under MPI (default: 3)", positive, 3)
    add_options(parser, "synthetic")
    option(
        parser, "--train-args", "TEXT",
        'further options of mpitrain train for every run, such as "--epochs 3 --target accuracy=0.9"',
        default="",
    )  # fmt: skip
    option(
        parser, "--compute", "LAW",
        'how long a virtual batch takes, as for simulate (default: "measured(3)", timed here)',
        default="measured(3)",
    )  # fmt: skip
    option(
        parser, "--network", "LAW", 'how long virtual messages take (default: "ideal()")', default="ideal()"
    )
    option(
        parser, "--mpi", "KIND",
        "which launcher: auto (default), openmpi, mpich or srun",
        default="auto", choices=("auto", "openmpi", "mpich", "srun"),
    )  # fmt: skip
    option(parser, "--run-dir", "DIR", "where the runs go (default: runs/JOB-bench-DATE-TIME)")
    switch(parser, "--quiet", "figures of merit and files only")
    option(parser, "--json", "FILE", "write the figures of all runs")
    option(parser, "--html", "FILE", "write a page with curves")


def run_bench(arguments: argparse.Namespace) -> int:
    """Measure, and print the table."""
    if why_not := why_no_launching("bench"):
        raise UsageError(why_not)
    from mpitrain.search.bench.command import bench_command
    from mpitrain.search.bench.settings import Request, TrainArgs

    try:
        words = shlex.split(arguments.train_args)
    except ValueError as error:
        arguments.parser.error(f"--train-args {arguments.train_args!r}: {error}")
    words += ["--synthetic"] if arguments.synthetic else []
    inner = arguments.parse(["train", arguments.job, *words])  # a wrong option is said before any run
    if inner.dry_run:
        arguments.parser.error("--train-args: --dry-run measures nothing")
    workers = arguments.workers
    if workers is None:
        workers = () if arguments.virtual_workers else (1, 2)
    return bench_command(
        asked(
            Request, arguments, path=arguments.job, workers=workers,
            train=TrainArgs(words, overrides(inner), inner.options),
        )
    )  # fmt: skip
