"""`mpitrain runs`: runs beside one another, the best setting among them, and what the time of one went to."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mpitrain.cli.common.options import command, option, switch
from mpitrain.errors import UsageError, printable
from mpitrain.system.saying import hand_out, say, tell

_TABLE_DESCRIPTION = """\
Print runs beside one another: the options in which they differ, their metrics,
samples per second, how they ended, and mean and spread over seeds and folds."""

_BEST_DESCRIPTION = """\
Print the directory of a run of the best setting: of runs that differ in seed
and fold alone the mean counts, so no run is chosen for its luck. How good the
setting is, and what it gives on a held-out part, goes to stderr."""

_GOODPUT_DESCRIPTION = """\
Print what the wall time of a run went to over all its starts, until now where
it is under way, and its useful samples a second, over those of the same run
undisturbed on the same machine."""

_GOODPUT_EPILOG = """\
examples:
  mpitrain runs goodput runs/faulty
  mpitrain runs goodput runs/faulty runs/calm"""

_EPILOG = """\
DIR is a run, a sweep, or a directory of runs.

examples:
  mpitrain runs table runs/first
  mpitrain runs table runs/sync runs/async --csv runs.csv --html runs.html
  mpitrain runs best runs/first --metric validation_loss
  mpitrain runs best runs/first --over-seeds --test "data/digits/validate-*.h5"
  mpitrain predict "$(mpitrain runs best runs/first)" data/new -o out.h5"""


def add_parser(commands: Any) -> None:
    """Add `runs` and its own subcommands to the command's subparsers."""
    parser = commands.add_parser(
        "runs", help="compare runs, and name the best setting", description="Runs beside one another."
    )
    actions = parser.add_subparsers(title="commands", dest="action", metavar="COMMAND", required=True)
    shown = command(actions, "table", "a table of runs", run_table, _TABLE_DESCRIPTION, _EPILOG)
    option(shown, "--csv", "FILE", "write a line for each run, all digits; - is the standard output")
    option(shown, "--html", "FILE", "write a page that needs no network")
    best = command(
        actions, "best", "the directory of a run of the best setting", run_best, _BEST_DESCRIPTION, _EPILOG
    )
    switch(
        best, "--over-seeds",
        "the directories of all runs of that setting, one a line (default: of its first seed and fold)",
    )  # fmt: skip
    option(
        best, "--test", "PATTERN",
        "shards that nothing was chosen by, to measure the best setting on (default: --test of the runs, or test= "
        "of their job)",
    )  # fmt: skip
    spent = command(
        actions, "goodput", "what a run's time went to", run_goodput, _GOODPUT_DESCRIPTION, _GOODPUT_EPILOG
    )
    option(spent, "folder", "RUN", "the directory of a run", Path)
    option(spent, "undisturbed", "UNDISTURBED", "that of the same run undisturbed", Path, nargs="?")
    for one in (shown, best):
        option(one, "folders", "DIR", "runs, sweeps, or directories of runs", nargs="+")
        option(
            one, "--metric", "NAME",
            "what runs are compared by, as in train --keep-best (default: the sweep's, the runs' first target, or "
            "the validation loss)",
        )  # fmt: skip


def run_table(arguments: argparse.Namespace) -> None:
    """Print or write the table."""
    from mpitrain.search.table import as_csv, as_html, as_text, read_table
    from mpitrain.system.files.atomic import check_output, write_whole

    to_stdout = arguments.csv == "-"
    check_output(None if to_stdout else arguments.csv, "--csv")
    check_output(arguments.html, "--html")
    found = read_table(arguments.folders, arguments.metric)
    if arguments.csv and not to_stdout:
        write_whole(Path(arguments.csv), as_csv(found))
    if arguments.html:
        write_whole(Path(arguments.html), as_html(found))
    if to_stdout:
        hand_out(as_csv(found))
    else:
        say(as_text(found))


def run_goodput(arguments: argparse.Namespace) -> None:
    """Print the parts of a run's time, and its goodput."""
    from mpitrain.reporting.goodput import goodput_text

    say(goodput_text(arguments.folder, arguments.undisturbed))


def run_best(arguments: argparse.Namespace) -> None:
    """Print the directory, or those of all runs of the best setting; how good that is goes to stderr."""

    from mpitrain.search.table import read_table
    from mpitrain.training.ensembles.held_out import held_out_lines

    found = read_table(arguments.folders, arguments.metric)
    best = found.best()
    rows = best.runs if arguments.over_seeds else best.runs[:1]
    for row in rows:
        path = str(row.folder)
        if path != printable(path):
            raise UsageError(f"the name of the directory {path!r} cannot be printed: rename it")
        say(path)
    lines = [*found.about(best), *held_out_lines([row.folder for row in best.runs], found.by, arguments.test)]
    tell("\n".join(lines))
