"""What a course is made of, whatever family of strategies it is of.

Invariants: courses are made of literals, print as what makes them, and say nothing of what is as usual.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from mpitrain.virtual import Constant, Exponential, LogNormal

LAWS = {
    "even": Constant(1.0, 0.0), "spread": Constant(1.0, 0.3), "exponential": Exponential(),
    "heavy": LogNormal(1.0, 1.0),
}  # fmt: skip
NEVER_S = 1e9


@dataclass(frozen=True, repr=False)
class Literal:
    """Prints as what makes it, without what is as usual."""

    def __repr__(self) -> str:
        unusual = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in unusual)})"


def simpler(course: Any) -> Iterator[Any]:
    """The same with less: a start or a fault left out, or something as usual, the simplest first."""
    for one in fields(course):
        value = getattr(course, one.name)
        if one.default == ():
            for at in range(len(value)):
                yield replace(course, **{one.name: (*value[:at], *value[at + 1 :])})
    for one in fields(course):
        if one.default is not MISSING and getattr(course, one.name) != one.default:
            yield replace(course, **{one.name: one.default})
    for one in fields(course):
        value = getattr(course, one.name)
        if isinstance(value, Literal):
            yield from (replace(course, **{one.name: less}) for less in simpler(value))
        elif isinstance(value, tuple):
            for at, part in enumerate(value):
                if isinstance(part, Literal):
                    for less in simpler(part):
                        yield replace(course, **{one.name: (*value[:at], less, *value[at + 1 :])})
