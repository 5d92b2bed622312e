"""`mpitrain report`: a page of one run, or of several beside one another."""

from __future__ import annotations

import argparse
from typing import Any

from mpitrain.cli.common.options import command, option
from mpitrain.system.saying import say

_DESCRIPTION = """\
Write one HTML page that needs no network: curves of loss, metrics and
throughput, staleness, where the workers' time went, faults and restarts, the
environment; of several runs, their curves together and what was different.
It draws with matplotlib (pip install "mpitrain[plot]")."""

_EPILOG = """\
examples:
  mpitrain report runs/mine
  mpitrain report runs/sync runs/async runs/localsgd -o strategies.html"""


def add_parser(commands: Any) -> None:
    """Add `report` to the command's subparsers."""
    parser = command(commands, "report", "make a page of one or more runs", run_report, _DESCRIPTION, _EPILOG)
    option(parser, "run_dirs", "RUN_DIR", "of a run, finished or not, or of several runs", nargs="+")
    option(parser, "-o --out", "FILE", "the page (default: report.html)", default="report.html")


def run_report(arguments: argparse.Namespace) -> None:
    """Write the page, and print where it is."""
    from mpitrain.reporting.page import write_page

    write_page(arguments.run_dirs, arguments.out)
    say(f"written: {arguments.out}")
