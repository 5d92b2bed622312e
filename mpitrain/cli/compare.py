"""`mpitrain compare`: whether one run does as another did."""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING, Any

from mpitrain.cli.common.options import command, option, switch
from mpitrain.errors import EXIT_ERROR, EXIT_OK
from mpitrain.system.saying import say
from mpitrain.system.sizes import significant

if TYPE_CHECKING:
    from mpitrain.reporting.run_differences import Comparison

_DESCRIPTION = """\
Compare the figures of two finished runs of one job: samples per second and all
validation metrics. The first run is the baseline. What else differs (seed,
options, versions, machine) is listed. Exit code 0: all figures are within their
tolerances, 1: one is beyond, 2: the runs are not comparable (another job,
strategy or batch size, ...; a result that is missing, broken or failed)."""

_EPILOG = """\
examples:
  mpitrain compare runs/yesterday runs/today
  mpitrain compare runs/a runs/b --tolerance 5% --tolerance accuracy=0.005
  mpitrain compare baseline.json runs/today --tolerance 10% --worse-only
  mpitrain compare runs/sync runs/async --across strategy,servers,workers"""

_WIDTH = 80


def add_parser(commands: Any) -> None:
    """Add `compare` to the command's subparsers."""
    parser = command(
        commands, "compare", "compare two runs within tolerances", run_compare, _DESCRIPTION, _EPILOG
    )
    option(parser, "first", "RUN", "directory of the run that is the baseline, or its result.json")
    option(parser, "second", "RUN", "of the run that is measured by it")
    option(
        parser, "--tolerance", "T",
        "5%% (of the baseline; the default), 0.01 (absolute), or of one figure accuracy=0.5%%; may be given again",
        default=[], action="append",
    )  # fmt: skip
    switch(parser, "--worse-only", "a change for the better is within any tolerance")
    option(
        parser, "--across", "NAMES",
        "settings that may differ, with commas between them: strategy,workers",
        default="",
    )  # fmt: skip
    option(parser, "--json", "FILE", "write all of it")


def run_compare(arguments: argparse.Namespace) -> int:
    """Compare, and print each figure on a line."""
    from pathlib import Path

    from mpitrain.reporting.report import write_json
    from mpitrain.reporting.run_differences import compare, read_tolerances
    from mpitrain.system.files.atomic import check_output

    check_output(arguments.json, "--json")
    across = [name.strip() for name in arguments.across.split(",") if name.strip()]
    found = compare(
        Path(arguments.first),
        Path(arguments.second),
        read_tolerances(arguments.tolerance),
        across,
        arguments.worse_only,
    )
    if arguments.json:
        write_json(Path(arguments.json), found.record())
    say(_text(found))
    return EXIT_OK if found.is_within else EXIT_ERROR


def _text(found: Comparison) -> str:
    """All of it, in 80 columns but for long names."""
    lines = [f"baseline: {found.names[0]}", f"measured: {found.names[1]}", ""]
    width = max(8, *(len(one.name) for one in found.figures))
    lines.append(f"{'':<{width}}{'baseline':>13}{'measured':>13}{'difference':>13}{'tolerance':>11}")
    for one in found.figures:
        difference = f"{one.after - one.before:+.4g}"
        if one.tolerance.is_share and one.before:
            difference = f"{100 * (one.after - one.before) / abs(one.before):+.2f}%"
        verdict = "within" if one.is_within else "beyond"
        before, after = significant(one.before, 6), significant(one.after, 6)
        lines.append(
            f"{one.name:<{width}}{before:>13}{after:>13}{difference:>13}{one.tolerance!s:>11}  {verdict}"
        )
    if found.differing:
        lines += ["", "what else differs:"]
    for name, pair in found.differing.items():
        lines += textwrap.wrap(
            f"{name}: {pair[0]} | {pair[1]}", _WIDTH, initial_indent="  ", subsequent_indent="    ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    beyond, of = sum(not one.is_within for one in found.figures), len(found.figures)
    verdict = f"{beyond} of {of} figures are beyond their tolerances"
    lines += ["", verdict if beyond else f"all {of} figures are within their tolerances"]
    return "\n".join(lines)
