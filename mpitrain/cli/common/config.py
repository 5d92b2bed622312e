"""`--config FILE`: options of a command from a TOML file, as the words one would type in front of the others.

Invariants: the command line comes after the file, so it replaces what the file says; an option that may be given
several times is taken from the command line alone where that names it. Every value goes through the option's own check.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mpitrain.cli.common.parser import Parser, did_you_mean
from mpitrain.errors import UsageError

_NEVER = ("--config", "--help")


def words_of(parser: Parser, path: str, typed: Sequence[str]) -> list[str]:
    """What the file at `path` adds to the words that were `typed`.

    Raises:
        UsageError: there is no such file, it is no TOML, or it holds what no option of `parser` takes.
    """
    named = {word.partition("=")[0] for word in typed}
    found = []
    for key, value in _load(path).items():
        if isinstance(value, dict) and f"--{_option(key)}" not in parser._option_string_actions:
            found += [f"--set={name}={text}" for name, text in _settings(path, key, value)]
            continue
        action = _action(parser, path, key)
        if isinstance(action, argparse._AppendAction) and action.option_strings[0] in named:
            continue
        if isinstance(value, dict) and isinstance(action, argparse._AppendAction):
            found += [f"--{_option(key)}={name}={text}" for name, text in _entries(path, key, value)]
            continue
        found += _words(path, key, value, action)
    return found


def _load(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror} (looked in {Path.cwd()})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: this is no TOML: {error}") from None


def _option(key: str) -> str:
    return key.replace("_", "-")


def _action(parser: Parser, path: str, key: str) -> argparse.Action:
    option = f"--{_option(key)}"
    known = {name: one for name, one in parser._option_string_actions.items() if name not in _NEVER}
    if option not in known:
        long = [name for name in known if name.startswith("--")]
        raise UsageError(
            f"--config {path}: {parser.prog} has no option {option}{did_you_mean(option, long)}; a parameter that the "
            f'job file declares stands in a table, such as "[model]" and "hidden = 256"'
        )
    return known[option]


def _words(path: str, key: str, value: object, action: argparse.Action) -> list[str]:
    """The option with this value, or several times where it takes several."""
    option, where = f"--{_option(key)}", f"--config {path}: {key}"
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UsageError(f"{where} is true or false, got {value!r}")
        return [option] * value
    values = value if isinstance(value, list) and isinstance(action, argparse._AppendAction) else [value]
    for one in values:
        if isinstance(one, bool) or not isinstance(one, str | int | float):
            raise UsageError(f"{where} takes a number or a text, got {one!r}")
        try:
            if callable(action.type):
                action.type(str(one))
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"{where}: {error}") from None
        if action.choices is not None and one not in action.choices:
            raise UsageError(f"{where}: no {one!r} among {', '.join(map(str, action.choices))}")
    return [f"{option}={one}" for one in values]


def _entries(path: str, key: str, table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The entries of a table for an option that takes NAME=VALUE, such as `[vary]`; those of a table in it as
    `table.name`."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _entries(path, key, value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", dict(_settings(path, key, {name: value}))[f"{key}.{name}"]


def _settings(path: str, group: str, table: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from mpitrain.options import show

    for key, value in table.items():
        if not isinstance(value, bool | int | float | str | list):
            raise UsageError(
                f"--config {path}: {group}.{key} must be a number, a text, true, false or a list of these, got "
                f"{json.dumps(value, default=str)}"
            )
        yield f"{group}.{key}", show(value)
