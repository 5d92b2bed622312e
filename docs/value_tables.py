"""Tables of everything that strategy texts can hold, made from `mpitrain/strategies/registry.py` and from docstrings.

A value is described by its class's docstring up to `Args:`, an option by its line below that.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from functools import partial

import mpitrain.inject
import mpitrain.virtual  # noqa: F401 - registers laws of virtual time
from docs.families import FAMILIES
from docs.family_pictures import CURVES
from docs.markdown import cell, table
from mpitrain.codecs.base import Feedback
from mpitrain.strategies import registry
from mpitrain.strategies.base import ServerStrategy
from mpitrain.values import Value, registered


def classes(kind: str) -> list[type[Value]]:
    """The values of a kind, in the order of the registry."""
    found: list[type[Value]] = [registry.find(row.public) for row in registry.rows(kind)]
    return found or registered(kind)


def description(cls: type[Value]) -> str:
    """The docstring up to `Args:`."""
    return cell(inspect.cleandoc(cls.__doc__ or "").split("\nArgs:")[0])


def written(cls: type[Value]) -> str:
    """How a value is written: with the arguments that it shares with its family only where no table lists these."""
    row = registry.describe(cls.__name__, cls)
    if row.kind != "inject" or not row.inherited:
        return row.signature
    own = row.signature.partition("(")[2].rstrip(")")
    return f"{row.name}({', '.join(filter(None, (row.inherited, own)))})"


def options(cls: type[Value]) -> dict[str, str]:
    """What the docstring says of each option, by its name or names."""
    _, _, args = inspect.cleandoc(cls.__doc__ or "").partition("Args:\n")
    found: dict[str, str] = {}
    last = ""
    for line in args.split("\n\n")[0].splitlines():
        if named := re.match(r"    (\w[\w, ]*): (.*)", line):
            last, found[named[1]] = named[1], named[2]
        elif line.strip():
            found[last] += " " + line
    return {names: cell(text) for names, text in found.items()}


def of_kind(kind: str, head: str, names: Sequence[str] = ()) -> str:
    """Values of a kind, or those of it that are named, and below them their options."""
    found = [cls for cls in classes(kind) if not names or cls.name in names]
    rows = [(f"`{written(cls)}`", description(cls)) for cls in found]
    told = [(f"`{cls.name}`", f"`{names}`", text) for cls in found for names, text in options(cls).items()]
    return table((head, "meaning"), *rows) + (
        "\n\n" + table((head, "option", "meaning"), *told) if told else ""
    )


def all_strategies() -> str:
    """A row for each strategy: what its family's page says in full."""
    homes = {name: family for family in FAMILIES for name in family.strategies}
    rows = []
    for cls in classes("strategy"):
        family = homes[cls.name]
        link = f"[`{cls.name}`](strategies/{family.key}.md#options)"
        summary = registry.describe(cls.__name__, cls).summary
        rows.append((link, cell(summary), family.strategies[cls.name]))
    return table(("strategy", "meaning", "who waits"), *rows)


def families() -> str:
    """A heading for each family, with its picture and its curve."""
    parts = []
    for family in FAMILIES:
        names = ", ".join(f"`{name}`" for name in family.strategies)
        parts += [
            f"## {family.title}",
            f"{names}. Who waits: {family.waits}. Choose it {family.choose}. [More](strategies/{family.key}.md)",
            f"![{family.title}: who sends what to whom](pictures/who-{family.key}.svg)",
            f"![{CURVES[family.key].title}](pictures/curve-{family.key}.svg)",
        ]
    return "\n\n".join(parts)


def of_base(cls: type[Value]) -> str:
    """The options that all subclasses of a class share."""
    return table(("option", "meaning"), *((f"`{names}`", text) for names, text in options(cls).items()))


def example() -> str:
    """The source of one damping."""
    source = inspect.getsource(inspect.getmodule(registry.find("Power")) or registry)
    return f"```python\n{source.strip()}\n```"


SECTIONS = {
    "example": example,
    "strategies": all_strategies,
    "families": families,
    **{
        f"family {family.key.replace('-', ' ')}": partial(
            of_kind, "strategy", "strategy", tuple(family.strategies)
        )
        for family in FAMILIES
    },
    "server options": lambda: of_base(ServerStrategy),
    "dampings": lambda: of_kind("damping", "damping"),
    "batching": lambda: of_kind("batching", "batching"),
    "codecs": lambda: of_kind("codec", "codec"),
    "codec options": lambda: of_base(Feedback),
    "schedules": lambda: of_kind("schedule", "schedule"),
    "outers": lambda: of_kind("outer", "outer optimizer"),
    "compute laws": lambda: of_kind("compute", "compute law"),
    "costs": lambda: of_kind("costs", "costs"),
    "network laws": lambda: of_kind("network", "network law"),
    "injections": lambda: of_kind("inject", "injection"),
}
