"""The argument parser of every subcommand: 80 columns, nearest-word answers, one copy of each message.

Invariants: it is imported by `mpitrain --help`, so it imports only what answers that. Under `mpirun`
every rank fails on the same command line in the same way before MPI has started; only the rank that
is 0 in the launcher's environment prints.
"""

from __future__ import annotations

import argparse
import difflib
import sys
import textwrap
from collections.abc import Iterable
from typing import Any, NoReturn

from mpitrain.errors import EXIT_USAGE, printable
from mpitrain.system.launched.launch_variables import launched_rank
from mpitrain.system.saying import write


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Examples keep their lines, and the width is 80 columns whatever the terminal, as in a manual."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=80)

    def _format_action(self, action: argparse.Action) -> str:
        if action.nargs == argparse.PARSER:  # the list of commands, without a heading that only says COMMAND
            return "".join(self._format_action(command) for command in action._get_subactions())  # type: ignore[attr-defined]
        return super()._format_action(action)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)  # an option's name is one word


class Parser(argparse.ArgumentParser):
    """`ArgumentParser` that takes no abbreviations and answers a wrong word with the nearest right one.

    Abbreviations are refused because `--epoch` would work today and become ambiguous with the next option. An `epilog`
    may be a function, which is called when the help is printed. `dashed` names options whose value may begin with a -.
    """

    dashed: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", HelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self.set_defaults(parser=self)  # the innermost parser wins: the one that knows the options meant

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As `ArgumentParser` does."""
        words = list(sys.argv[1:] if args is None else args)
        for name in self.dashed:
            while name in words[:-1]:
                index = words.index(name)
                words[index : index + 2] = [f"{name}={words[index + 1]}"]
        return super().parse_known_args(words, namespace)

    def format_help(self) -> str:
        """The help, the epilog made now if it is a function."""
        if callable(self.epilog):
            self.epilog = self.epilog()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Print the message and where the help is, and exit with the usage code."""
        self._print_message(f"{self.prog}: error: {message}\nSee: {self.prog} --help\n", sys.stderr)
        sys.exit(EXIT_USAGE)

    def refuse(self, extras: list[str]) -> NoReturn:
        """Answer arguments that no option of this parser takes."""
        option = next((word for word in extras if word.startswith("-") and word != "-"), None)
        if option is None:
            self.error(f"unexpected argument {extras[0]!r}")
        name = option.partition("=")[0]
        near = did_you_mean(name, self._option_string_actions)
        if not near and "--set" in self._option_string_actions:
            near = "; a parameter that the job file declares is given as --set NAME=VALUE"
        self.error(f"unknown option {name!r}{near}")

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError as error:
            if action.option_strings and action.help:  # what it wants to be given
                error.message += f", {action.metavar} ({action.help.partition('. ')[0]})"
            raise

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action, f"no {value!r} among {', '.join(choices)}{did_you_mean(str(value), choices)}"
            )

    def _print_message(self, message: str, file: Any = None) -> None:
        if launched_rank() == 0:
            write(sys.stderr if file is None else file, printable(message))


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest choice, or nothing if none is near."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
