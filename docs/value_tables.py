"""Tables of the registered values (strategies, dampings, codecs, ...), made from their docstrings and fields.

A value is described by the first paragraph of its class's docstring, an option by its line under `Args:`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re

import mpitrain.inject  # noqa: F401 - registers stragglers and faults
from docs.markdown import cell, table
from mpitrain.strategies import ServerStrategy
from mpitrain.strategies.compression import Feedback
from mpitrain.values import Value, registered


def own_fields(cls: type[Value]) -> list[dataclasses.Field]:
    """The fields that a class declares or changes itself, in order."""
    declared = cls.__dict__.get("__annotations__", {})
    return [field for field in dataclasses.fields(cls) if field.name in declared]


def call(cls: type[Value]) -> str:
    """How a value is written, with the defaults of its own options."""
    shown = []
    for field in own_fields(cls):
        default = field.default
        missing = default is dataclasses.MISSING
        text = "..." if missing else str(default) if isinstance(default, Value) else repr(default)
        shown.append(f"{field.name}={text}")
    return f"`{cls.name}({', '.join(shown)})`"


def summary(cls: type[Value]) -> str:
    """The first paragraph of the docstring."""
    return cell(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0])


def options(cls: type[Value]) -> dict[str, str]:
    """What the docstring says of each option, by its name or names."""
    _, _, args = inspect.cleandoc(cls.__doc__ or "").partition("Args:\n")
    found: dict[str, str] = {}
    for line in args.split("\n\n")[0].splitlines():
        named = re.match(r"    (\w[\w, ]*): (.*)", line)
        if named:
            last = named[1]
            found[last] = named[2]
        elif line.strip():
            found[last] += " " + line
    return {name: cell(text) for name, text in found.items()}


def of_kind(kind: str) -> str:
    """Values of a kind, and below them their options."""
    classes = registered(kind)
    rows = [(call(cls), summary(cls)) for cls in classes]
    text = table((kind if kind != "inject" else "injection", "what it does"), *rows)
    described = [
        (f"`{cls.name}`", f"`{name}`", told) for cls in classes for name, told in options(cls).items()
    ]
    return text + ("\n\n" + table((kind, "option", "meaning"), *described) if described else "")


def of_base(cls: type[Value]) -> str:
    """The options that all subclasses of a class share."""
    by_name = {field.name: field for field in dataclasses.fields(cls)}
    rows = []
    for names, told in options(cls).items():
        texts = [
            f"{name}={str(default) if isinstance(default := by_name[name].default, Value) else repr(default)}"
            for name in names.split(", ")
        ]
        rows.append((", ".join(f"`{text}`" for text in texts), told))
    return table(("option", "meaning"), *rows)


SECTIONS = {
    "strategies": lambda: of_kind("strategy"),
    "server options": lambda: of_base(ServerStrategy),
    "dampings": lambda: of_kind("damping"),
    "batching": lambda: of_kind("batching"),
    "codecs": lambda: of_kind("codec"),
    "codec options": lambda: of_base(Feedback),
    "schedules": lambda: of_kind("schedule"),
    "outers": lambda: of_kind("outer"),
    "injections": lambda: of_kind("inject"),
}  # fmt: skip
