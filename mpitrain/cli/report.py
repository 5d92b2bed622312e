"""`mpitrain report`: a page of one run, or of several beside one another."""

from __future__ import annotations

import argparse
from typing import Any

from mpitrain.cli.common.options import command, option, switch
from mpitrain.errors import UsageError
from mpitrain.system.saying import say

_DESCRIPTION = """\
Write one HTML page that needs no network: how the run stands, whether it met
its target, curves of loss, metrics and throughput, where the workers' time
went, faults and restarts, the environment; of several runs, which is best, by
how much and whether that can be told, their curves together and what was
different. With --follow the page is written anew while the run goes on, and
shows how far it is, how long it takes yet and who is in.
It draws with matplotlib (pip install "mpitrain[plot]")."""

_EPILOG = """\
examples:
  mpitrain report runs/mine
  mpitrain report runs/sync runs/async runs/localsgd -o strategies.html
  mpitrain report --follow runs/mine"""


def add_parser(commands: Any) -> None:
    """Add `report` to the command's subparsers."""
    parser = command(commands, "report", "make a page of one or more runs", run_report, _DESCRIPTION, _EPILOG)
    option(parser, "run_dirs", "RUN_DIR", "of a run, finished or not, or of several runs", nargs="+")
    option(parser, "-o --out", "FILE", "the page (default: report.html)", default="report.html")
    switch(
        parser, "--follow",
        "of one run, begun or not: write the page anew until the run has ended; the page loads itself again",
    )  # fmt: skip


def run_report(arguments: argparse.Namespace) -> int | None:
    """Write the page, and print where it is."""
    from pathlib import Path

    from mpitrain.reporting.pages.following import follow
    from mpitrain.reporting.pages.page import write_page

    if arguments.follow:
        if len(arguments.run_dirs) > 1:
            raise UsageError("--follow follows one run: name one RUN_DIR")
        return follow(Path(arguments.run_dirs[0]), Path(arguments.out))
    write_page(arguments.run_dirs, arguments.out)
    say(f"written: {arguments.out}")
    return None
