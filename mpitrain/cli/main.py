"""The command `mpitrain`: subcommands, their help, and what an error looks like.

Invariants: a module here builds its parser from the standard library alone, and imports what it runs
(torch, h5py, MPI) inside its `run` function, so that `mpitrain --help` answers at once. The words and exit
codes live here; the work lives elsewhere.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from mpitrain.cli.common.config import words_of
from mpitrain.cli.common.parser import Parser
from mpitrain.errors import (
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    AgreedError,
    MpitrainError,
    UsageError,
    printable,
)
from mpitrain.system import stacks
from mpitrain.system.home import give_home
from mpitrain.system.launched import rank_status
from mpitrain.system.launched.end_requests import hold_back
from mpitrain.system.launched.launch_variables import is_rank, launched_rank
from mpitrain.system.saying import flush, lost, prepare_streams, tell

# The module of each command, in the order of the help.
_COMMANDS = (
    "launch", "train", "sweep", "runs", "simulate", "plan", "bench", "predict", "ensemble", "export", "report",
    "compare", "data", "slurm", "doctor", "examples", "common.completion", "env",
)  # fmt: skip

_DESCRIPTION = """\
Train PyTorch models over MPI. The job is a Python file, the strategy by which
the ranks agree is a value on the command line."""

_EPILOG = """\
examples:
  mpitrain data pack digits data/digits
  mpitrain launch -n 4 train jobs/digits.py
  mpitrain launch -n 4 train jobs/digits.py --strategy "async(servers=1)"
  mpitrain simulate jobs/digits.py --strategy "async()" --workers 16

exit codes:
  0 ok   1 error   2 wrong usage   3 target missed   4 preflight failed
  75 ended on request, run me again   130 interrupted   143 ended at once

Every command answers --help with its own options and examples."""


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from mpitrain import __version__

        parser._print_message(f"mpitrain {__version__}\n", sys.stdout)
        parser.exit()


def build_parser() -> Parser:
    """The parser of the whole command; each subcommand sets `run`, a function of the parsed arguments."""
    parser = Parser(prog="mpitrain", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    parser.set_defaults(parse=parse)  # for commands that are given the words of another
    for name in _COMMANDS:
        import_module(f"mpitrain.cli.{name}").add_parser(commands)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, or an exit with code 2 and the nearest valid word."""
    arguments, extras = build_parser().parse_known_args(list(argv))
    if extras:
        arguments.parser.refuse(extras)
    if path := getattr(arguments, "config", None):
        try:
            words = words_of(arguments.parser, path, argv)
        except UsageError as error:
            arguments.parser.error(printable(str(error)))
        return build_parser().parse_args([argv[0], *words, *argv[1:]])
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; the console script and `python -m mpitrain`.

    A user's mistake is one line on stderr. Other errors show where they came from; those that nobody raised
    on purpose pass through to the interpreter, and under MPI to the runtime's hook, which ends the job.
    """
    prepare_streams()
    give_home()
    if not _is_there():  # neither MPI nor torch's libraries can be loaded then
        tell("mpitrain: error: the directory that this command was started in is gone; change to another one")
        return EXIT_USAGE
    argv = list(sys.argv[1:] if argv is None else argv)
    if is_rank():
        stacks.listen()
        hold_back(argv)
    arguments = parse(argv)
    try:
        return _printed(arguments.command, arguments.run(arguments) or EXIT_OK)
    except AgreedError as error:
        return error.exit_code  # rank 0 has said it for all
    except MpitrainError as error:
        where = f" rank {launched_rank()}:" if is_rank() else ""
        if not isinstance(error, UsageError):
            # not by sys.excepthook: under MPI that ends the whole job
            tell("".join(traceback.format_exception(error)), end="")
        tell(f"mpitrain: error:{where} {error}")
        return error.exit_code
    except KeyboardInterrupt:
        if is_rank():  # die of it: at an orderly exit this rank would wait for the others
            rank_status.reach(rank_status.ENDED, EXIT_INTERRUPTED)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        tell("mpitrain: interrupted")
        return EXIT_INTERRUPTED


# What these leave lies in files; of the others what they print is all there is.
_LEAVE_FILES = ("launch", "train", "sweep", "simulate", "bench", "predict", "ensemble", "export", "data")


def _printed(command: str, code: int) -> int:
    """The exit code, once what was printed has gone where it belongs."""
    flush()
    if (why := lost()) and command not in _LEAVE_FILES and code == EXIT_OK:
        tell(f"mpitrain: error: the standard output takes nothing more: {why}")
        return EXIT_ERROR
    return code


def _is_there() -> bool:
    """Whether the working directory still is."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
