"""Where the time of traced steps went: the spans of a trace file, added up by category.

Invariants: it only reads. The time of a span counts for its own category, without that of the spans within it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mpitrain.system.trace import CODEC, COMMUNICATION, COMPUTE, OPTIMIZER, OTHER, READ, SERVER, STEP, WAIT

_Found = TypeVar("_Found")
CATEGORIES = (COMPUTE, OPTIMIZER, READ, CODEC, WAIT, COMMUNICATION, SERVER, OTHER)


class TracedTime(NamedTuple):
    """Of one rank.

    Attributes:
        label: the rank and its role; num_steps: of its own; a server has none.
        seconds: by category, on the rank's main thread.
    """

    label: str
    num_steps: int
    seconds: dict[str, float]


class Span(NamedTuple):
    """What a rank did from a second of the trace's clock on, for so many seconds."""

    category: str
    began_s: float
    took_s: float


def read_traces(folder: Path) -> list[TracedTime]:
    """Of the trace files in a run directory, by rank; a file that cannot be read is passed over."""
    return [found for _, found in _read(folder, _add_up)]


def read_spans(folder: Path) -> dict[int, list[Span]]:
    """The spans of each rank's main thread, those around others first."""
    return dict(_read(folder, _spans))


def _read(folder: Path, of: Callable[[list[dict[str, Any]]], _Found]) -> list[tuple[int, _Found]]:
    found: list[tuple[int, _Found]] = []
    for path in folder.glob("trace-rank-*.json"):
        try:
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
            found.append((int(path.stem.split("-")[-1]), of(events)))
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return sorted(found, key=lambda pair: pair[0])


def _spans(events: list[dict[str, Any]]) -> list[Span]:
    spans = [one for one in events if one["ph"] == "X" and one["tid"] == 0 and one["cat"] in CATEGORIES]
    spans.sort(key=lambda one: (one["ts"], -one["dur"]))
    return [Span(one["cat"], one["ts"] / 1e6, one["dur"] / 1e6) for one in spans]


def _add_up(events: list[dict[str, Any]]) -> TracedTime:
    label = next((str(one["args"]["name"]) for one in events if one["name"] == "process_name"), "?")
    spans = [one for one in events if one["ph"] == "X" and one["tid"] == 0]
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    around: list[tuple[float, str]] = []  # spans that are open: their ends and categories
    for one in sorted(spans, key=lambda one: (one["ts"], -one["dur"])):
        while around and around[-1][0] <= one["ts"] + 1e-3:
            around.pop()
        category = one["cat"] if one["cat"] in seconds else OTHER
        seconds[category] += one["dur"] / 1e6
        if around:
            seconds[around[-1][1]] -= one["dur"] / 1e6
        around.append((one["ts"] + one["dur"], category))
    num_steps = sum(one["cat"] == STEP for one in spans)
    return TracedTime(label, num_steps, {name: max(0.0, value) for name, value in seconds.items()})
