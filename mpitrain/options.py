"""Parameters that a job file declares with `Options`, and `--set GROUP.NAME=VALUE` or a configuration file replaces.

Invariants: the default says of which type a value is, and a text of another type is refused. While a job file is read,
every declaration is noted and every setting must find one; outside, the defaults hold, but in processes that a run has
started, which have the run's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from mpitrain.errors import UsageError
from mpitrain.values import nearest

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a list of its kind",
}


class _Reading:
    """What is known while a job file is read: the settings given for it, and what it has declared so far."""

    def __init__(self, settings: Sequence[str]):
        self.given = dict(map(split_setting, settings))  # of two for one name the last one holds
        self.declared: dict[str, Any] = {}
        self.misfits: list[str] = []  # told when all that is declared is known; till then the defaults hold

    def declare(self, group: str, defaults: Mapping[str, object]) -> dict[str, Any]:
        values = {}
        for name, default in defaults.items():
            full = f"{group}.{name}"
            if full in self.declared:
                raise UsageError(f"the job file declares {full} twice")
            self.declared[full] = values[name] = default
            if full in self.given:
                try:
                    self.declared[full] = values[name] = _read(self.given[full], default)
                except ValueError:
                    self.misfits.append(
                        f"--set {full}={self.given[full]}: {full} is {_KINDS[type(default)]}, such as {show(default)}"
                    )
        return values

    def check(self, path: str) -> None:
        known = f"{path} declares {', '.join(self.declared)}"
        if self.misfits:
            raise UsageError(f"{self.misfits[0]}; {known}")
        for full in self.given:
            if full not in self.declared and not self.declared:
                raise UsageError(
                    f"--set {full}: {path} declares no parameters; "
                    'mpitrain.Options("model", hidden=64) declares model.hidden, a whole number'
                )
            if full not in self.declared:
                raise UsageError(
                    f"--set {full}: {path} declares no such parameter{nearest(full, list(self.declared))}"
                )


_HANDED_ON = "MPITRAIN_JOB_SETTINGS"
_reading: ContextVar[_Reading | None] = ContextVar("reading", default=None)


class Options(Mapping[str, Any]):
    """A group of parameters of a job file; each is an attribute and a key.

    `model = mpitrain.Options("model", hidden=64, dropout=0.1)` declares `model.hidden` and `model.dropout`, which
    `--set model.hidden=256` and the table `[model]` of a `--config` file replace; the job file then says
    `Net(model.hidden, model.dropout)` or `Net(**model)`.

    Args:
        group: the word before the dot.
        defaults: a bool, int, float or str, or a list or tuple of these (read as a tuple); a value that is given must
            be of the same type, with whole numbers for floats, too.

    Raises:
        UsageError: a default is of another type, a value that is given does not fit, a name is declared twice, or is
            that of a method.
    """

    def __init__(self, group: str, /, **defaults: bool | float | str | Sequence[bool | float | str]):
        if not _WORD.fullmatch(group):
            raise UsageError(f"Options: the group must be a word such as 'model', got {group!r}")
        if not defaults:
            raise UsageError(f'Options: say which, such as Options("{group}", hidden=64)')
        checked = {name: check_value(f"{group}.{name}", value) for name, value in defaults.items()}
        for name in defaults:
            if name.startswith("_") or name in dir(Mapping):
                raise UsageError(f"Options: {group}.{name}: this name is a method's; take another")
        reading = _reading.get()
        if reading is None:
            reading = _handed_on(sys._getframe(1).f_globals.get("__file__"))
        self._group = group
        self._values = checked if reading is None else reading.declare(group, checked)

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name not in values:
            raise AttributeError(
                f"the options {self.__dict__.get('_group', '?')!r} have no {name!r}{nearest(name, list(values))}"
            )
        return values[name]

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Options({self._group!r}, {', '.join(f'{name}={value!r}' for name, value in self.items())})"


@contextmanager
def reading(path: str, settings: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """While the job file at `path` runs: `settings` ("model.hidden=256") replace what it declares. Yields what has been
    declared, by full name, with the values that hold.

    Raises:
        UsageError: at the end, where a setting has found no declaration.
    """
    now = _Reading(settings)
    token = _reading.set(now)
    try:
        yield now.declared
    finally:
        _reading.reset(token)
    now.check(path)


def check_not_reading(what: str) -> None:
    """Refuse a run within a job file that is being read.

    Raises:
        UsageError: names the call, `mpitrain.<what>`.
    """
    if _reading.get() is not None:
        raise UsageError(
            f"mpitrain.{what} is called while a job file is read for its job: put the call under `if __name__ == "
            '"__main__":`, so that the job can be read without it'
        )


@contextmanager
def told_of_argparse(file: Path) -> Iterator[None]:
    """While a job file runs: what its own parser would read are the words of mpitrain's command line.

    Raises:
        UsageError: it reads them; says what to write in place of the parser.
    """
    before = argparse.ArgumentParser.parse_args

    def parse_args(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        if args is not None:
            return before(self, args, namespace)
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != str(file):
            frame = frame.f_back
        line = f", line {frame.f_lineno}" if frame is not None else ""
        raise UsageError(
            f"{file}{line}: parse_args() would read mpitrain's own command line; {_in_place_of(self)}"
        )

    argparse.ArgumentParser.parse_args = parse_args  # type: ignore[method-assign]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_args = before  # type: ignore[method-assign]


def _in_place_of(parser: argparse.ArgumentParser) -> str:
    """What to write in place of a parser."""
    examples = {int: 1, float: 0.1, bool: False}
    values = {}
    for action in parser._actions:
        if action.dest in ("help", argparse.SUPPRESS) or not _WORD.fullmatch(action.dest):
            continue
        value = action.default
        if isinstance(value, list | tuple):
            value = [one for one in value if isinstance(one, bool | int | float | str)]
        elif not isinstance(value, bool | int | float | str):
            value = examples.get(action.type, "...") if isinstance(action.type, type) else "..."
        values[action.dest] = value
    values = values or {"hidden": 64}
    declared = ", ".join(f"{name}={value!r}" for name, value in values.items())
    name, value = next(iter(values.items()))
    return (
        f'write `args = mpitrain.Options("args", {declared})` in its place: args.{name} is read as before, and --set '
        f"args.{name}={show(value)} gives another value"
    )


def hand_on(path: str, settings: Sequence[str]) -> None:
    """Let processes that this one starts, and that import the job file at `path` by its name, declare it with the same
    settings: a loader's process that is not forked makes its own of it.
    """
    os.environ.pop(_HANDED_ON, None)
    if settings:
        os.environ[_HANDED_ON] = json.dumps([os.path.realpath(path), list(settings)])


def _handed_on(file: str | None) -> _Reading | None:
    """Settings for the file that declares, if another process has handed them on."""
    text = os.environ.get(_HANDED_ON)
    if text is None or file is None:
        return None
    path, settings = json.loads(text)
    return _Reading(settings) if os.path.realpath(file) == path else None


def split_setting(text: str) -> tuple[str, str]:
    """Name and text of a `--set`.

    Raises:
        UsageError: it has no `=`.
    """
    name, sign, value = text.partition("=")
    if not (sign and name.strip()):
        raise UsageError(f"--set {text!r}: say GROUP.NAME=VALUE, such as --set model.hidden=256")
    return name.strip(), value


def settings_of(options: Mapping[str, object]) -> list[str]:
    """The `--set` texts that give these values, by full name."""
    return [f"{name}={show(value)}" for name, value in options.items()]


def show(value: object) -> str:
    """A value as `--set` reads it."""
    return value if isinstance(value, str) else json.dumps(value)


def check_value(full: str, default: object) -> Any:
    """The default of a parameter, a list as a tuple.

    Raises:
        UsageError: its type is none that `Options` knows.
    """
    if isinstance(default, list | tuple):
        if not all(isinstance(one, bool | int | float | str) for one in default):
            raise UsageError(
                f"Options: {full} must hold numbers, texts, true and false only, got {default!r}"
            )
        return tuple(default)
    if not isinstance(default, bool | int | float | str):
        raise UsageError(
            f"Options: {full} needs a default from which its type can be told (a number, a text, true or false, or a "
            f"list of these), got {default!r}"
        )
    return default


def _read(text: str, default: Any) -> Any:
    """The value that `text` is, of the type of `default`; ValueError where it is none."""
    kind = type(default)
    if kind is str:
        return text
    value = json.loads(text)
    if kind is float and type(value) is int:
        value = float(value)
    if kind is tuple and isinstance(value, list):
        value = tuple(value)
        if default and not all(_alike(one, default[0]) for one in value):
            value = None
    if type(value) is not kind or value != value:
        raise ValueError(text)
    return value


def _alike(value: object, first: object) -> bool:
    return type(value) is type(first) or (isinstance(first, float) and type(value) is int)
