"""What is made of the rows of `gpu.py`, and of what `make gpu` printed."""

from __future__ import annotations

import re
from typing import Any

from measuring.measurement import ROOT

from docs.markdown import table
from pages.rows import newest, origin, spread

TESTS = ROOT / "tests" / "gpu.txt"
_HOW = {True: "MPI adds device memory", False: "by way of the host"}


def gpu() -> str:
    """Exchanges and steps of two ranks on one GPU, and runs of one."""
    exchanges = newest("gpu", "direct", "megabytes", what="all_reduce")
    steps = newest("gpu", "direct", "model", what="step")
    runs = newest("gpu", "model", what="run")
    parts = [
        table(["all_reduce, two ranks on one GPU", "way", *_heads(exchanges)], *map(_exchange, exchanges.items())),
        table(["a training step, two ranks on one GPU", "way", *_heads(steps)], *map(_step, steps.items())),
        table(
            ["a whole run, one rank", "torch's loop, samples/s", "`allreduce()`, samples/s", "times the time (95 %)"],
            *(
                [
                    model, *(f"{1e3 / row['median_ms'][way]:.0f}" for way in ("torch", "mpitrain")),
                    spread(row["ratio_to_torch"]["mpitrain"]),
                ]
                for (model,), row in runs.items()
            ),
        ),
        origin(*runs.values()).splitlines()[0],
    ]  # fmt: skip
    return "\n\n".join(parts)


def _heads(found: dict[tuple[Any, ...], dict[str, Any]]) -> list[str]:
    return [
        head
        for way in _ways(found)
        for head in (f"{way}, ms", *([] if way == "gloo" else ["to gloo (95 %)"]))
    ]


def _ways(found: dict[tuple[Any, ...], dict[str, Any]]) -> list[str]:
    return list(next(iter(found.values()))["median_ms"])


def _figures(row: dict[str, Any]) -> list[str]:
    cells = []
    for way, value in row["median_ms"].items():
        cells += [f"{value:.2f}", *([] if way == "gloo" else [spread(row["ratio_to_gloo"][way])])]
    return cells


def _exchange(entry: tuple[tuple[Any, ...], dict[str, Any]]) -> list[str]:
    (direct, megabytes), row = entry
    return [f"{megabytes:g} MB", _HOW[direct], *_figures(row)]


def _step(entry: tuple[tuple[Any, ...], dict[str, Any]]) -> list[str]:
    (direct, model), row = entry
    return [model, _HOW[direct], *_figures(row)]


def proven() -> str:
    """On which GPU the tests ran, and how many passed."""
    told = TESTS.read_text(encoding="utf-8").splitlines()
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", told[-1])}
    others = counts.get("failed", 0) + counts.get("error", 0)
    return f"{told[0]}: {counts['passed']} tests of `make gpu` passed, {others} did not."
