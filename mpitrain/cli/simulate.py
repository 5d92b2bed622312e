"""`mpitrain simulate`: the same job and strategy in virtual time, in this one process."""

from __future__ import annotations

import argparse
from typing import Any

from mpitrain.cli.common.options import asked, command, option, switch
from mpitrain.cli.train import add_job_options, overrides
from mpitrain.errors import EXIT_ERROR, MpitrainError
from mpitrain.job.overrides import CHECKPOINT_TIMES
from mpitrain.system.number_texts import positives
from mpitrain.system.saying import tell

_DESCRIPTION = """\
Simulate a job in virtual time: the strategy's own servers and workers with real
gradients, on as many workers as you like, in one process without MPI."""

_EPILOG = """\
compute laws (seconds per batch):
  constant(1, jitter=0.1)          every batch takes 1 s, give or take 10 %
  exponential(1)                   memoryless with mean 1 s
  shifted_exponential(1, 1)        1 s plus an exponential of mean 1 s
  lognormal(1, 0.5)                mean 1 s, heavy tail
  gamma(1, shape=4)                mean 1 s, spread 1 / sqrt(shape)
  pareto(1, alpha=3)               mean 1 s, heaviest tail
  bernoulli(gamma(1), chance=0.1, factor=5)        every tenth batch is slow
  persistent(gamma(1), factors=[1, 1, 3])          a worker keeps its factor
  measured(5)                      this job's batches, timed here for 5 s
  trace("runs/NAME")               times of a run with --trace steps=0:1000

network laws:
  ideal()                          messages arrive at once
  link(gbit_per_s=10)              each rank has one link, so pushes queue
  cluster(ranks_per_node=4)        ranks of a node share its adapter
  cluster(nodes_per_switch=16, oversubscription=4, sharing="fair")
  cluster(eager_bytes=65536)       longer messages wait for their receiver
  gbe1() gbe10() gbe100() hdr() ndr() slingshot()      clusters with known links
  measured("comm.json")            what doctor --comm --json comm.json measured

costs (of what is neither a gradient nor a message):
  costs(memory_gb_per_s=20)        a server's update takes its memory's time
  costs(codec_gb_per_s=2, read_s=0.01, validate_s=3)
  costs(checkpoint_gb_per_s=1, restart_s=120)      writing, and starting again

The figure of merit says virtual=1: its seconds are those of the laws above, not
measured ones.

examples:
  mpitrain simulate jobs/digits.py --strategy "async()" --workers 16
  mpitrain simulate jobs/digits.py --strategy "async(servers=2)" --workers 100 \\
      --compute "shifted_exponential(1, 1)" --epochs 2
  mpitrain simulate jobs/digits.py --strategy "async()" --strategy "sync()" \\
      --workers 1,2,4,8 --network "gbe1()" --target accuracy=0.9 --html s.html
  mpitrain simulate jobs/digits.py --strategy "allreduce()" --timing-only \\
      --workers 100,1000 --steps 50
  mpitrain simulate jobs/digits.py --strategy "allreduce()" --timing-only \\
      --inject "crash(mtbf_s=600)" --costs "costs(restart_s=60)" --workers 64
  mpitrain simulate --replay runs/digits-20261121-024707"""


def add_parser(commands: Any) -> None:
    """Add `simulate` to the command's subparsers."""
    parser = command(
        commands, "simulate", "simulate a job in virtual time", run_simulate, _DESCRIPTION, _EPILOG
    )
    add_job_options(parser, job_is_optional=True, several_strategies=True)
    world = parser.add_argument_group("the virtual world")
    option(
        world, "--workers", "N,N,...",
        "virtual workers; of several numbers, and of several --strategy, every pair is a run (default: 8)",
        positives, (8,),
    )  # fmt: skip
    option(
        world, "--compute", "LAW",
        'how long a batch takes (default: "constant(1, jitter=0.1)")',
        default="constant(1, jitter=0.1)",
    )  # fmt: skip
    option(world, "--network", "LAW", 'how long messages take (default: "ideal()")', default="ideal()")
    option(
        world, "--costs", "COSTS",
        "what else takes time, such as costs(memory_gb_per_s=20) (default: nothing)",
        default="costs()",
    )  # fmt: skip
    option(
        world, "--checkpoint-every", "WHEN",
        f"{CHECKPOINT_TIMES}; some are written where this is given, where --costs says what one or a restart "
        "takes, or where --inject orders a crash",
    )  # fmt: skip
    option(world, "--replay", "RUN_DIR", "repeat a real run's updates in their recorded order, to the bit")
    switch(world, "--timing-only", "no gradients, and so no loss: thousands of workers in seconds")
    option(parser, "--json", "FILE", "write the figures of all runs")
    option(
        parser, "--html", "FILE",
        "write a page of them: loss against virtual time, speed-up, and with --trace what each rank did",
    )  # fmt: skip


def run_simulate(arguments: argparse.Namespace) -> int:
    """Run the simulations; prints loss against virtual time and the staleness histogram, or a table of all runs."""
    from mpitrain.simulation.command import Request, simulate_command
    from mpitrain.system.tracebacks import frames

    try:
        overridden = overrides(arguments)
        return simulate_command(
            asked(Request, arguments, path=arguments.job, overrides=overridden, settings=arguments.options)
        )
    except MpitrainError:
        raise
    except Exception as error:
        tell(f"{frames(error)}mpitrain: {type(error).__name__}: {error}")
        return EXIT_ERROR
