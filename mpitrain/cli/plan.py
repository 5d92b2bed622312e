"""`mpitrain plan`: how fast a job would be on many workers, and what to do, before it is submitted."""

from __future__ import annotations

import argparse
from typing import Any

from mpitrain.cli.train import add_options
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
    parser = commands.add_parser(
        "plan", help="predict a job's speed-up, and advise", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("job", metavar="JOB", help="job file: Python that ends in `job = mpitrain.Job(...)`")
    parser.add_argument("--batch-size", type=positive, metavar="N", help="samples per worker and step")
    parser.add_argument("--epochs", type=positive, metavar="N", help="passes over the data")
    add_options(parser, "synthetic")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="options",
        help="a parameter of the job file",
    )
    parser.add_argument(
        "--strategy",
        action="append",
        default=[],
        metavar="TEXT",
        help="to predict, as often as you like (default: five usual ones)",
    )
    parser.add_argument("--workers", type=positives, default=(), metavar="N,N,...", help="numbers of workers")
    parser.add_argument(
        "--best",
        metavar="BY",
        help="rank settings by speed, accuracy, accuracy-in=TIME (such as 2h), accuracy-per-epoch or cost",
    )
    parser.add_argument(
        "--train",
        type=positive,
        metavar="N",
        default=0,
        help="train the N best of --best in virtual time, with real gradients, and rank those by what came of it",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    machine = parser.add_argument_group("the machine")
    machine.add_argument("--machine", metavar="FILE", help="its description, in TOML")
    machine.add_argument("--nodes", type=positive, metavar="N", help="for workers")
    machine.add_argument(
        "--ranks-per-node", type=positive, metavar="N", help="workers that share a node's link"
    )
    machine.add_argument("--memory", type=above_zero, metavar="GIB", help="of a device")
    machine.add_argument("--network", metavar="LAW", help='such as "gbe10()" or "measured(\'comm.json\')"')
    _add_times(parser.add_argument_group("times"))
    parser.set_defaults(run=run_plan)


def _add_times(times: Any) -> None:
    times.add_argument(
        "--probe",
        action="store_true",
        help="measure the job's steps on this host, and, as a launch on several nodes without --network, their links",
    )
    times.add_argument(
        "--probe-s", type=above_zero, default=30.0, metavar="S", help="how long, in seconds (default: 30)"
    )
    times.add_argument("--compute", metavar="LAW", help='how long a batch takes, such as "constant(0.1)"')
    times.add_argument("--apply-s", type=rate, metavar="S", help="a server's update with a whole gradient")
    times.add_argument(
        "--read-s", type=rate, metavar="S", help="reading a batch, where computing waits for it"
    )
    times.add_argument(
        "--fixed",
        type=fraction,
        metavar="X",
        help="share of a batch's time that does not depend on its samples",
    )
    times.add_argument(
        "--backward", type=fraction, metavar="X", help="share of a batch's time in which gradients can travel"
    )


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    from mpitrain.job import Overrides
    from mpitrain.planning.plan import Request, plan_command

    return plan_command(
        Request(
            arguments.job,
            Overrides(
                batch_size=arguments.batch_size, epochs=arguments.epochs, synthetic=arguments.synthetic
            ),
            settings=arguments.options,
            workers=arguments.workers,
            strategies=arguments.strategy,
            budget_s=arguments.probe_s if arguments.probe else None,
            compute=arguments.compute,
            network=arguments.network,
            machine=arguments.machine,
            nodes=arguments.nodes,
            ranks_per_node=arguments.ranks_per_node,
            memory_gib=arguments.memory,
            apply_s=arguments.apply_s,
            read_s=arguments.read_s,
            fixed=arguments.fixed,
            backward=arguments.backward,
            best=arguments.best,
            train=arguments.train,
            json=arguments.json,
        )
    )
