"""`mpitrain bench`: measure a job under several strategies and numbers of workers."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from mpitrain.cli.train import add_options, overrides
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
    parser = commands.add_parser(
        "bench",
        help="measure a job under several strategies and numbers of workers",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("job", metavar="JOB", help="job file: Python that ends in `job = mpitrain.Job(...)`")
    parser.add_argument(
        "--strategies",
        nargs="+",
        default=["allreduce"],
        metavar="TEXT",
        help="to measure; the others are compared with the first (default: allreduce)",
    )
    parser.add_argument(
        "--workers", type=positives, metavar="N,N,...",
        help="workers of the runs under MPI (default: 1,2, or none beside --virtual-workers)",
    )  # fmt: skip
    parser.add_argument(
        "--virtual-workers", type=positives, default=(), metavar="N,N,...", help="workers of the virtual runs"
    )
    parser.add_argument(
        "--global-batch-size", type=positive, metavar="N", help="samples of all workers and a step together"
    )
    parser.add_argument(
        "--repeats", type=positive, default=3, metavar="N", help="runs of each setting under MPI (default: 3)"
    )
    add_options(parser, "synthetic")
    parser.add_argument(
        "--train-args", default="", metavar="TEXT",
        help='further options of mpitrain train for every run, such as "--epochs 3 --target accuracy=0.9"',
    )  # fmt: skip
    parser.add_argument(
        "--compute", default="measured(3)", metavar="LAW",
        help='how long a virtual batch takes, as for simulate (default: "measured(3)", timed here)',
    )  # fmt: skip
    parser.add_argument(
        "--network",
        default="ideal()",
        metavar="LAW",
        help='how long virtual messages take (default: "ideal()")',
    )
    parser.add_argument(
        "--mpi", choices=("auto", "openmpi", "mpich", "srun"), default="auto", metavar="KIND",
        help="which launcher: auto (default), openmpi, mpich or srun",
    )  # fmt: skip
    parser.add_argument(
        "--run-dir", metavar="DIR", help="where the runs go (default: runs/JOB-bench-DATE-TIME)"
    )
    parser.add_argument("--quiet", action="store_true", help="figures of merit and files only")
    parser.add_argument("--json", metavar="FILE", help="write the figures of all runs")
    parser.add_argument("--html", metavar="FILE", help="write a page with curves")
    parser.set_defaults(run=run_bench)


def run_bench(arguments: argparse.Namespace) -> int:
    """Measure, and print the table."""
    if why_not := why_no_launching("bench"):
        raise UsageError(why_not)
    from mpitrain.search.bench.command import bench_command
    from mpitrain.search.bench.settings import Request

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
        Request(
            arguments.job,
            arguments.strategies,
            workers,
            arguments.virtual_workers,
            arguments.global_batch_size,
            arguments.repeats,
            words,
            overrides(inner),
            inner.options,
            arguments.compute,
            arguments.network,
            arguments.mpi,
            arguments.run_dir,
            arguments.json,
            arguments.html,
            arguments.quiet,
        )
    )
