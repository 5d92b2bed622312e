"""How a command's arguments and options are declared, and handed on."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

Asked = TypeVar("Asked")


def command(
    commands: Any, name: str, help: str, run: Callable[[argparse.Namespace], int | None], description: str,
    epilog: Any = None, **more: Any,
) -> Any:  # fmt: skip
    """A command's parser. `run` carries it out, and gives the exit code; none is 0.

    Args:
        epilog: A text, or what makes one when the help is asked for.
    """
    parser = commands.add_parser(name, help=help, description=description, epilog=epilog, **more)
    parser.set_defaults(run=run)
    return parser


def option(
    group: Any, names: str, metavar: str, help: str, reads: Callable[[str], Any] | None = None,
    default: object = None, **more: Any,
) -> None:  # fmt: skip
    """Add an argument, or an option with a value, to a parser or a group of it.

    Args:
        names: of an option several, with a blank between them.
        metavar: what its value is called; reads: the value of a word of the command line.
        more: as for `ArgumentParser.add_argument`.
    """
    group.add_argument(*names.split(), metavar=metavar, help=help, type=reads, default=default, **more)


def switch(group: Any, name: str, help: str) -> None:
    """Add an option without a value."""
    group.add_argument(name, help=help, action="store_true")


def asked(kind: type[Asked], arguments: argparse.Namespace, **more: Any) -> Asked:
    """What a command is asked as one value: each field is the argument of its name, unless `more` has it."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in vars(arguments).items() if name in names} | more)
