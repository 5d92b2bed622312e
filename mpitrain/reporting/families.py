"""Families of metrics: names that differ in one word alone, such as those of a metric per class.

Invariants: a function of the names. Every name is in one family, which may be its own. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mpitrain.reporting.console import short
from mpitrain.reporting.rows import metrics_in

FEWEST = 4  # members of a family
_WORD = re.compile(r"[^/_.:\-\s\[\]()]+")
_NUMBER = re.compile(r"\d+")


class Family(NamedTuple):
    """Names that go together; `pattern` has a `*` where they differ, and is the name itself of one that is alone."""

    pattern: str
    names: tuple[str, ...]


def families(names: Iterable[str], alone: Iterable[str] = ()) -> list[Family]:
    """The families in the order of their first members; the names in `alone` go with no others."""
    names, apart = list(dict.fromkeys(names)), set(alone)
    left = [name for name in names if name not in apart]
    found: dict[str, str] = {}  # the family of each name that has others
    for patterns_of in (_by_number_or_end, _by_beginning):
        while True:
            members: dict[str, list[str]] = {}
            for name in left:
                for pattern in patterns_of(name):
                    members.setdefault(pattern, []).append(name)
            best = max(members, key=lambda one: (len(members[one]), -one.count("*")), default="")
            if len(members.get(best, ())) < FEWEST:
                break
            found |= dict.fromkeys(members[best], best)
            left = [name for name in left if name not in found]
    patterns = dict.fromkeys(found.get(name, name) for name in names)
    return [Family(one, tuple(name for name in names if found.get(name, name) == one)) for one in patterns]


def _by_number_or_end(name: str) -> set[str]:
    """The name with one of its numbers, with all of them, or with its last word left open."""
    found = {f"{name[: at.start()]}*{name[at.end() :]}" for at in _NUMBER.finditer(name)}
    words = list(_WORD.finditer(name))
    if len(words) > 1:
        found.add(f"{name[: words[-1].start()]}*{name[words[-1].end() :]}")
    return found | ({_NUMBER.sub("*", name)} if found else set())


def _by_beginning(name: str) -> set[str]:
    words = list(_WORD.finditer(name))
    return {f"*{name[words[0].end() :]}"} if len(words) > 1 else set()


def line_of(name: str, row: Mapping[str, object], width: int | None) -> str:
    """An event as a line for eyes. One that is wider than `width` (None: as wide as it likes) names of a family of
    metrics the least and the largest, and leaves out the last metrics; all else stays."""
    texts = {key: f"{key} {short(value)}" for key, value in row.items()}
    whole = " ".join([name, *texts.values()])
    if width is None or len(whole) <= width:
        return whole
    values = {key: value for key, value in metrics_in(row).items() if isinstance(value, float)}
    members: dict[str, Sequence[str]] = {}
    for family in families(values):
        first, *others = family.names
        members[first] = family.names
        if others:
            of = [values[one] for one in family.names]
            texts[first] = f"{family.pattern} {short(min(of))} to {short(max(of))} ({len(of)})"
            texts = {key: text for key, text in texts.items() if key not in others}
    line, num_left_out = " ".join([name, *texts.values()]), 0
    for first in reversed(members):
        if len(line) <= width:
            break
        num_left_out += len(members[first])
        texts = {key: text for key, text in texts.items() if not text.startswith("+")}
        texts[first] = f"+{num_left_out} metrics"
        line = " ".join([name, *texts.values()])
    return line
