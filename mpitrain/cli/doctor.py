"""`mpitrain doctor`: is this machine fit to train on?"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from mpitrain.cli.parser import natural, rate
from mpitrain.errors import EXIT_OK, EXIT_PREFLIGHT_FAILED

_DESCRIPTION = """\
Say whether nodes are fit to train on, before a run finds out. Exit code 4 if
not; the names of unfit nodes go to a file for sbatch --exclude."""

_EPILOG = """\
examples:
  mpitrain doctor --node                                this machine, no MPI
  srun --mpi=none --ntasks-per-node=1 mpitrain doctor --node --report DIR
  mpitrain doctor --collect DIR --hosts "n1 n2 n3" --failing failing_nodes.txt
  srun --ntasks-per-node=4 mpitrain doctor --comm --failing failing_nodes.txt
  srun --ntasks-per-node=4 mpitrain doctor --gpu-mpi    a step of its own

--node needs no MPI, --comm three nodes or more to name a slow one, and
--gpu-mpi a step of its own, because an MPI that cannot do it may crash."""


def add_parser(commands: Any) -> None:
    """Add `doctor` to the command's subparsers."""
    parser = commands.add_parser(
        "doctor", help="check whether nodes are fit to train on", description=_DESCRIPTION, epilog=_EPILOG
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--node", action="store_true", help="this node by itself: memory, disk, locks, clock, HDF5, devices"
    )
    what.add_argument("--collect", metavar="DIR", help="judge the reports of --node --report DIR")
    what.add_argument(
        "--comm", action="store_true", help="latency and rate of all pairs; ranks that share a GPU"
    )
    what.add_argument(
        "--gpu-mpi", action="store_true", help="whether this MPI carries device memory, to the bit"
    )
    node = parser.add_argument_group("what a fit node has (--node)")
    node.add_argument(
        "--gpus", type=natural, metavar="N", help="devices (default: as many as Slurm gave the node)"
    )
    node.add_argument(
        "--devices", default="", metavar="PATTERN", help="count these files instead of asking CUDA"
    )
    node.add_argument(
        "--disk", default="$TMPDIR", metavar="DIR", help="for large files (default: $TMPDIR of the node)"
    )
    node.add_argument("--data", default="", metavar="FILE", help="an HDF5 file to read from")
    node.add_argument("--min-memory-gib", type=rate, default=1.0, metavar="X", help="available (default: 1)")
    node.add_argument(
        "--min-free-gib", type=rate, default=1.0, metavar="X", help="free on --disk (default: 1)"
    )
    node.add_argument("--report", metavar="DIR", help="also write NODE.json there, on the shared file system")
    out = parser.add_argument_group("what comes out")
    out.add_argument("--hosts", metavar="NAMES", help="nodes that should have reported (--collect)")
    out.add_argument("--failing", metavar="FILE", help="write the unfit nodes' names there, a line each")
    out.add_argument(
        "--json",
        metavar="FILE",
        help="write the pairs' figures there, for simulate --network measured (--comm)",
    )
    parser.set_defaults(run=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Examine, collect or measure; the exit code says fit or unfit."""
    if arguments.json and not arguments.comm:
        arguments.parser.error("--json FILE holds what --comm measures: give both")
    if arguments.node:
        return _run_node(arguments)
    if arguments.collect:
        return _run_collect(arguments)
    return _run_ranks(arguments)


def _run_ranks(arguments: argparse.Namespace) -> int:
    """The checks that every rank takes part in."""
    from mpitrain.mpi.runtime import start
    from mpitrain.system.atomic import check_output
    from mpitrain.training.agree import attempt

    def check() -> None:
        if runtime.rank == 0:
            check_output(arguments.json, "--json")
            check_output(arguments.failing, "--failing")

    runtime = start()
    if arguments.comm:
        from mpitrain.doctor.pairs import run_comm

        attempt(runtime, check)
        failing, figures = (Path(name) if name else None for name in (arguments.failing, arguments.json))
        code = run_comm(runtime, failing, figures=figures)
    else:
        from mpitrain.doctor.canary import run_canary

        code = run_canary(runtime)
    runtime.finish()
    return code


def _run_node(arguments: argparse.Namespace) -> int:
    from mpitrain.doctor.node import Wanted, examine, write_report
    from mpitrain.system.launch_variables import node_name

    checks = examine(
        Wanted(
            arguments.gpus,
            arguments.devices,
            arguments.disk,
            arguments.report or ".",
            arguments.data,
            arguments.min_memory_gib,
            arguments.min_free_gib,
        )
    )
    name = node_name()
    print(
        "".join(f"{name}: {'ok   ' if c.ok else 'UNFIT'} {c.name}: {c.detail}\n" for c in checks),
        end="",
        flush=True,
    )
    if arguments.report:
        write_report(Path(arguments.report), name, checks)
    if any(check.detail.startswith("no answer") for check in checks):
        sys.stdout.flush()
        os._exit(
            EXIT_PREFLIGHT_FAILED
        )  # a thread that hangs in a dead file system would keep the interpreter
    return EXIT_OK if all(check.ok for check in checks) else EXIT_PREFLIGHT_FAILED


def _run_collect(arguments: argparse.Namespace) -> int:
    from mpitrain.doctor.node import collect
    from mpitrain.system.atomic import check_output

    check_output(arguments.failing, "--failing")
    if not arguments.hosts:
        arguments.parser.error("--collect needs the names of the nodes that should have reported: --hosts")
    hosts = arguments.hosts.split()
    wrong = collect(Path(arguments.collect), hosts)
    for host, faults in wrong.items():
        print(f"unfit: {host}: {'; '.join(faults)}")
    if arguments.failing:
        Path(arguments.failing).write_text("".join(f"{host}\n" for host in wrong), encoding="utf-8")
    print(f"{len(hosts) - len(wrong)} of {len(hosts)} node(s) fit", flush=True)
    return EXIT_PREFLIGHT_FAILED if wrong else EXIT_OK
