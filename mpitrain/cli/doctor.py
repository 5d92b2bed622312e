"""`mpitrain doctor`: is this machine fit to train on?"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.cli.common.options import asked, command, option, switch
from mpitrain.errors import EXIT_OK, EXIT_PREFLIGHT_FAILED, UsageError
from mpitrain.system.number_texts import above_zero, fraction, natural, rate
from mpitrain.system.saying import flush, say

if TYPE_CHECKING:
    from mpitrain.doctor.checks import Check

_DESCRIPTION = """\
Say whether nodes are fit to train on, before a run finds out. Exit code 4 if
not; the names of unfit nodes go to a file for sbatch --exclude."""

_EPILOG = """\
examples:
  mpitrain doctor --node                                this machine, no MPI
  srun --mpi=none --ntasks-per-node=1 mpitrain doctor --node --report DIR
  mpitrain doctor --collect DIR --hosts "n1 n2 n3" --failing failing_nodes.txt
  mpitrain doctor --site slurm/site.sh                  its launch line
  srun --ntasks-per-node=4 mpitrain doctor --comm --failing failing_nodes.txt
  srun --ntasks-per-node=4 mpitrain doctor --gpu-mpi    a step of its own

--node needs no MPI, --comm three nodes or more to name a slow one, and
--gpu-mpi a step of its own, because an MPI that cannot do it may crash.
--collect names nodes that are slower than the others of their kind, of which
there have to be three. The checks of GPUs have not seen a GPU."""


def add_parser(commands: Any) -> None:
    """Add `doctor` to the command's subparsers."""
    parser = command(
        commands,
        "doctor",
        "check whether nodes are fit to train on",
        run_doctor,
        _DESCRIPTION,
        _EPILOG,
        usage="mpitrain doctor (--node|--collect DIR|--site FILE|--comm|--gpu-mpi) ...",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    switch(
        what, "--node", "this node by itself: memory, limits, disk, quota, locks, clock, HDF5, devices, speed"
    )
    option(what, "--collect", "DIR", "judge the reports of --node --report DIR")
    option(what, "--site", "FILE", "whether a site file can be sourced, and its LAUNCH line works here")
    switch(what, "--comm", "latency and rate of all pairs; ranks that share a GPU")
    switch(what, "--gpu-mpi", "whether this MPI carries device memory, to the bit")
    _add_wanted(parser.add_argument_group("what a fit node has (--node)"))
    out = parser.add_argument_group("what comes out")
    option(out, "--report", "DIR", "write NODE.json there, on the shared file system (--node)")
    option(out, "--hosts", "NAMES", "nodes that should have reported (--collect)")
    option(out, "--failing", "FILE", "write the unfit nodes' names there, a line each")
    option(
        out, "--slow", "X",
        "below this fraction of the others' speed is slow (--collect, --comm; default: 0.5)",
        fraction,
    )  # fmt: skip
    option(out, "--json", "FILE", "write the pairs' figures there, for simulate --network measured (--comm)")


def _add_wanted(node: Any) -> None:
    option(node, "--gpus", "N", "devices (default: as many as Slurm gave the node)", natural)
    option(node, "--devices", "PATTERN", "count these files instead of asking torch", default="")
    option(node, "--disk", "DIR", "for large files (default: $TMPDIR of the node)", default="$TMPDIR")
    option(node, "--data", "FILE", "an HDF5 file to read from", default="")
    option(node, "--min-memory-gib", "X", "available (default: 1)", rate, 1.0)
    option(node, "--min-free-gib", "X", "free on --disk (default: 1)", rate, 1.0)
    option(node, "--min-shm-gib", "X", "free in /dev/shm (default: 0.05)", rate, 0.05)
    option(node, "--min-open-files", "N", "ulimit -n (default: 1024)", natural, 1024)
    option(
        node, "--min-free-inodes", "N",
        "files that can be made on --disk and in --report (default: 1000)",
        natural, 1000,
    )  # fmt: skip
    option(node, "--speed-s", "S", "measure each speed for so long; 0: none (default: 1)", rate, 1.0)
    option(node, "--deadline-s", "S", "for each check, imports apart (default: 30)", above_zero, 30.0)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Examine, collect or measure; the exit code says fit or unfit."""
    if arguments.json and not arguments.comm:
        arguments.parser.error("--json FILE holds what --comm measures: give both")
    if arguments.report and not arguments.node:
        arguments.parser.error("--report DIR holds what --node finds: give both")
    if arguments.slow is not None and not (arguments.comm or arguments.collect):
        arguments.parser.error("--slow X is for --collect and --comm")
    if arguments.node:
        return _run_node(arguments)
    if arguments.collect:
        return _run_collect(arguments)
    if arguments.site:
        return _run_site(arguments)
    return _run_ranks(arguments)


def _run_site(arguments: argparse.Namespace) -> int:
    from mpitrain.doctor.site import examine_site

    path = Path(arguments.site)
    if not path.is_file():
        raise UsageError(f"--site {path}: no such file; `mpitrain slurm site` writes one")
    return _print_checks("", examine_site(path))


def _print_checks(name: str, checks: Sequence[Check]) -> int:
    """One line a check; the exit code."""
    who = f"{name}: " if name else ""
    lines = [f"{who}{'ok   ' if one.ok else 'UNFIT'} {one.name}: {one.detail}\n" for one in checks]
    say("".join(lines), end="")
    return EXIT_OK if all(check.ok for check in checks) else EXIT_PREFLIGHT_FAILED


def _run_ranks(arguments: argparse.Namespace) -> int:
    """The checks that every rank takes part in."""
    from mpitrain.mpi.runtime import start
    from mpitrain.system.files.atomic import check_output
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
        code = run_comm(runtime, failing, _slow(arguments), figures)
    else:
        from mpitrain.doctor.canary import run_canary

        code = run_canary(runtime)
    runtime.finish()
    return code


def _slow(arguments: argparse.Namespace) -> float:
    from mpitrain.doctor.judge import SLOW

    return SLOW if arguments.slow is None else float(arguments.slow)


def _run_node(arguments: argparse.Namespace) -> int:
    from mpitrain.doctor.checks import Wanted
    from mpitrain.doctor.node import examine
    from mpitrain.doctor.reports import node_kind, write_report
    from mpitrain.system.launched.launch_variables import node_name

    if arguments.report:
        _make_folder(Path(arguments.report))
    wanted = asked(Wanted, arguments, shared=arguments.report or ".")
    checks = examine(wanted, arguments.deadline_s)
    name = node_name()
    code = _print_checks(name, checks)
    if arguments.report:
        write_report(Path(arguments.report), name, checks, node_kind(wanted.num_gpus))
    if any(check.detail.startswith("no answer") for check in checks):
        flush()
        os._exit(code)  # a thread that hangs in a dead file system would keep the interpreter
    return code


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--report {folder}: no such directory can be made ({error.strerror})") from None


def _run_collect(arguments: argparse.Namespace) -> int:
    from mpitrain.doctor.reports import collect, summary
    from mpitrain.system.files.atomic import check_output

    check_output(arguments.failing, "--failing")
    if not arguments.hosts:
        arguments.parser.error("--collect needs the names of the nodes that should have reported: --hosts")
    hosts = arguments.hosts.split()
    verdict = collect(Path(arguments.collect), hosts, _slow(arguments))
    if arguments.failing:
        Path(arguments.failing).write_text("".join(f"{host}\n" for host in verdict.blamed), encoding="utf-8")
    for line in summary(verdict, len(hosts)):
        say(line)
    return EXIT_PREFLIGHT_FAILED if verdict.wrong else EXIT_OK
