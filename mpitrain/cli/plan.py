"""`mpitrain plan`: how fast a job would be on many workers, and what to do, before it is submitted."""

from __future__ import annotations

import argparse
from typing import Any

from mpitrain.cli.common.options import asked, command, option, switch
from mpitrain.cli.train import add_job, add_options
from mpitrain.system.number_texts import above_zero, fraction, positive, positives, rate

_DESCRIPTION = """\
Predict the speed-up of a job on a machine by strategy and number of workers,
say what holds each strategy back, and advise. The predictions are closed forms
of the times and links that are given, or that --probe measures on this host,
or, for strategies without one, a few steps in virtual time."""

_EPILOG = """\
A machine's file has any of these lines; options go before it:
  nodes = 16
  ranks_per_node = 4
  memory_gib = 80
  network = "hdr()"

The laws of --compute and --network are those of mpitrain simulate.

examples:
  mpitrain plan jobs/digits.py --probe --network "gbe10()" --workers 1,2,4,8
  mpitrain plan jobs/digits.py --compute "lognormal(0.02, 0.3)" \\
      --network "gbe1()" --nodes 16 --ranks-per-node 4 --best accuracy-in=2h
  mpitrain plan jobs/digits.py --probe --machine cluster.toml --best speed
  srun -N2 mpitrain plan jobs/digits.py --probe --workers 1,2,4,8,16
  mpitrain plan jobs/digits.py --probe --network "gbe1()" --workers 1,2,4,8 \\
      --best accuracy-in=1m --train 4"""


def add_parser(commands: Any) -> None:
    """Add `plan` to the command's subparsers."""
    parser = command(
        commands, "plan", "predict a job's speed-up, and advise", run_plan, _DESCRIPTION, _EPILOG
    )
    add_job(parser)
    option(parser, "--batch-size", "N", "samples per worker and step", positive)
    option(parser, "--epochs", "N", "passes over the data", positive)
    add_options(parser, "synthetic")
    option(
        parser, "--set", "NAME=VALUE",
        "a parameter of the job file",
        default=[], action="append", dest="options",
    )  # fmt: skip
    option(
        parser, "--strategy", "TEXT",
        "to predict, as often as you like (default: five usual ones)",
        default=[], action="append",
    )  # fmt: skip
    option(parser, "--workers", "N,N,...", "numbers of workers", positives, ())
    option(
        parser, "--best", "BY",
        "rank settings by speed, accuracy, accuracy-in=TIME (such as 2h), accuracy-per-epoch or cost",
    )  # fmt: skip
    option(
        parser, "--train", "N",
        "train the N best of --best in virtual time, with real gradients, and rank those by what came of it",
        positive, 0,
    )  # fmt: skip
    option(parser, "--json", "FILE", "write all figures")
    machine = parser.add_argument_group("the machine")
    option(machine, "--machine", "FILE", "its description, in TOML")
    option(machine, "--nodes", "N", "for workers", positive)
    option(machine, "--ranks-per-node", "N", "workers that share a node's link", positive)
    option(machine, "--memory", "GIB", "of a device", above_zero)
    option(machine, "--network", "LAW", 'such as "gbe10()" or "measured(\'comm.json\')"')
    _add_times(parser.add_argument_group("times"))


def _add_times(times: Any) -> None:
    switch(
        times, "--probe",
        "measure the job's steps on this host, and, as a launch on several nodes without --network, their links",
    )  # fmt: skip
    option(times, "--probe-s", "S", "how long, in seconds (default: 30)", above_zero, 30.0)
    option(times, "--compute", "LAW", 'how long a batch takes, such as "constant(0.1)"')
    option(times, "--apply-s", "S", "a server's update with a whole gradient", rate)
    option(times, "--push-s", "S", "a server's processor for each push besides", rate)
    option(times, "--read-s", "S", "reading a batch, where computing waits for it", rate)
    option(times, "--start-s", "S", "starting a rank that has a core to itself, as --probe measures it", rate)
    option(times, "--fixed", "X", "share of a batch's time that does not depend on its samples", fraction)
    option(times, "--backward", "X", "share of a batch's time in which gradients can travel", fraction)


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    from mpitrain.job import Overrides
    from mpitrain.planning.plan import Request, plan_command

    job = Overrides(batch_size=arguments.batch_size, epochs=arguments.epochs, synthetic=arguments.synthetic)
    return plan_command(
        asked(
            Request, arguments, path=arguments.job, overrides=job, settings=arguments.options,
            strategies=arguments.strategy, budget_s=arguments.probe_s if arguments.probe else None,
            memory_gib=arguments.memory,
        )
    )  # fmt: skip
