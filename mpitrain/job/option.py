"""How an option of a run is declared: in one field of `Overrides`, with all that the command line, the checks and a
resume have to know of it.

Invariants: light, because every command's help is made of the declarations.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from mpitrain.errors import UsageError
from mpitrain.values import nearest

# Under which heading of the help an option stands.
OF_JOB, OUTPUT, WAYS = "in place of the job's own", "output", "ways to run"
# What becomes of it when a run goes on from a checkpoint.
ACTS, CONVERTED, REFUSED = "acts", "converted", "refused"
PRECISIONS = ("float32", "bfloat16", "float16")


class Option(NamedTuple):
    """Of `train`, and of the commands that train.

    Attributes:
        group, help: heading and text of the help; metavar: what its value is called there, empty for a switch.
        reads: the value of a word of the command line, None for the word itself; choices: all that it can be.
        check: refuses a value that no run can have, given the option's name and the value.
        resume: what becomes of it when a run goes on.
        replaces: whether it takes the place of the job's field of the same name as it is.
    """

    group: str
    help: str
    metavar: str = ""
    reads: Callable[[str], Any] | None = None
    choices: Collection[str] | None = None
    check: Callable[[str, Any], None] | None = None
    resume: str = ACTS
    replaces: bool = False


def option(group: str, help: str, metavar: str = "", *, default: Any = None, **more: Any) -> Any:
    """A field that declares an `Option`; by its default () it may be given several times."""
    return dataclasses.field(default=default, metadata={"option": Option(group, help, metavar, **more)})


def declared(overrides: type) -> dict[str, tuple[Option, Any]]:
    """Each option and its default, by the field's name and in the order of the fields."""
    return {one.name: (one.metadata["option"], one.default) for one in dataclasses.fields(overrides)}


def add_option(group: Any, name: str, declaration: tuple[Option, object]) -> None:
    """Add it to a group of a parser."""
    one, default = declaration
    words: dict[str, Any] = {"help": one.help}
    if one.metavar:
        words |= {"metavar": one.metavar, "type": one.reads, "choices": one.choices, "default": default}
        if default == ():
            words |= {"action": "append", "default": []}
            del words["choices"]
    else:
        words["action"] = "store_true"
    group.add_argument(spelt(name), **{key: value for key, value in words.items() if value is not None})


def spelt(name: str) -> str:
    """The option as one types it."""
    return f"--{name.replace('_', '-')}"


def given(arguments: argparse.Namespace, overrides: type) -> dict[str, Any]:
    """The fields that the parsed arguments hold; a command lacks some."""
    found = {name: getattr(arguments, name) for name in declared(overrides) if hasattr(arguments, name)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def at_least_one(name: str, value: Any) -> None:
    """Refuse a count of nothing."""
    if value is not None and value < 1:
        raise UsageError(f"{name} must be at least 1, got {value}")


def not_negative(name: str, value: Any) -> None:
    """Refuse what is below 0, infinite or no number."""
    if value is not None and not 0 <= value < float("inf"):
        raise UsageError(f"{name} must be finite and not negative, got {value}")


def above_nothing(name: str, value: Any) -> None:
    """Refuse what is not above 0, infinite or no number."""
    if value is not None and not 0 < value < float("inf"):
        raise UsageError(f"{name} must be finite and greater than 0, got {value}")


def check_limit(name: str, value: Any, off: str = "left out for what the job says") -> None:
    """Refuse what no gradient can be clipped to."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < float("inf")):
        raise UsageError(
            f"{name} must be a finite number greater than 0, such as 1.0, or {off}, got {value!r}"
        )


def check_device(name: str, value: object) -> None:
    """Refuse what no worker computes on; None leaves it to the job."""
    if value is not None and value not in ("auto", "cpu") and not _is_accelerator(str(value)):
        raise UsageError(
            f'{name} must be "auto", "cpu", a kind of accelerator that this torch knows, such as "cuda" or "xpu", or '
            f'one device such as "cuda:1", got {value!r}'
        )


def _is_accelerator(text: str) -> bool:
    """Whether this torch knows such devices, which need not be here."""
    import torch

    if re.fullmatch(r"(?!cpu|meta)[a-z]\w*(:\d+)?", text) is None:
        return False
    try:
        return bool(torch.device(text).type)
    except RuntimeError:
        return False


def check_precision(name: str, value: object) -> None:
    """Refuse what nothing is computed in; None leaves it to the job."""
    if value is not None and value not in PRECISIONS:
        raise UsageError(f"{name}={value!r}{nearest(str(value), list(PRECISIONS))}")
