"""Runs beside one another as text of at most 80 columns.

Invariants: a pure function of what `--json` writes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from mpitrain.simulation.measured_step import spread_text
from mpitrain.system.sizes import counted, significant, size_text

WIDTH, NAME = 80, 25


def comparison_text(found: Mapping[str, Any]) -> str:
    """All of it."""
    rows = [row for row in found["rows"] if "samples_per_s" in row]
    lines = [
        "",
        f"one device: {significant(found['one_device_samples_per_s'])} samples/s of virtual time"
        + ("" if found["gradients"] else ", without gradients"),
        *(wrapped(spread_text(found["measured"])) if "measured" in found else []),
        "",
        *_throughput(rows),
        "",
        *_traffic(rows, bool(found["target"]) and found["gradients"]),
    ]
    if found["limits"]:
        lines += ["", *_limits(found["limits"])]
    for row in rows:
        if number := row.get("restarts", {}).get("num_restarts"):
            lines += wrapped(
                f"{row['strategy']}, {counted(row['workers'], 'worker')}: {_restarts(number, row['restarts'])}"
            )
    return "\n".join([*lines, *failures(found)])


def failures(found: Mapping[str, Any]) -> list[str]:
    """Lines that say which runs there were not, and which have failed, and why."""
    lines: list[str] = []
    for row in found["rows"]:
        if why := row.get("refused") or row.get("failure"):
            lines += wrapped(f"{row['strategy']}, {counted(row['workers'], 'worker')}: {why}")
    return lines


def _throughput(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    yield (
        f"{'strategy':<{NAME}}{'workers':>7}{'samples/s':>11}{'speed-up':>10}{'busy':>6}"
        f"{'stale 50/90/99':>15}{'lost':>6}"
    )
    for row in rows:
        stale = "/".join(str(row["staleness"].get(share, "-")) for share in ("0.5", "0.9", "0.99"))
        yield from named_row(
            row,
            f"{row['workers']:>7}{significant(row['samples_per_s']):>11}{row['speed_up']:>10.2f}"
            f"{100 * row['utilisation']:>5.0f}%"
            f"{stale if row['staleness'] else '-':>15}{100 * row['dropped_share']:>5.0f}%",
        )


def _traffic(rows: list[Mapping[str, Any]], has_target: bool) -> Iterator[str]:
    head = f"{'strategy':<{NAME}}{'workers':>7}{'virtual s':>10}{'a server':>10}{'a rank':>10}"
    yield head + (f"{'target s':>9}{'samples':>9}" if has_target else "")
    for row in rows:
        cells = f"{row['workers']:>7}{significant(row['virtual_s']):>10}" + "".join(
            f"{size_text(row[key]) if key in row else '-':>10}" for key in ("server_bytes", "rank_bytes")
        )
        if has_target:
            met = row.get("to_target")
            cells += (
                f"{significant(met['virtual_s']):>9}{_short(met['samples']):>9}"
                if met
                else f"{'-':>9}{'-':>9}"
            )
        yield from named_row(row, cells)
    yield "  (bytes that the busiest server takes in and sends out, or that a rank sends)"


def _restarts(number: int, restarts: Mapping[str, Any]) -> str:
    return (
        f"started again {counted(number, 'time')}: {significant(restarts['repeated_s'])} s of work repeated, "
        f"{significant(restarts['starting_s'])} s of starting"
    )


def _limits(limits: list[Mapping[str, Any]]) -> Iterator[str]:
    yield f"{'speed-up, fitted':<{NAME}}{'sigma':>9}{'kappa':>10}{'at most':>9}{'workers':>9}"
    for one in limits:
        most = "-" if one["speed_up"] is None else f"{one['speed_up']:.4g}"
        at = "-" if one["workers"] is None else f"{one['workers']:.0f}"
        yield from named_row(one, f"{one['sigma']:>9.4f}{one['kappa']:>10.1e}{most:>9}{at:>9}")


def named_row(row: Mapping[str, Any], cells: str) -> Iterator[str]:
    """The figures of a strategy; beneath its name, where that is long."""
    name = row["strategy"]
    if len(name) >= NAME:
        yield from wrapped(name)
        name = ""
    yield f"{name:<{NAME}}{cells}"


def _short(number: float) -> str:
    return f"{number:.0f}" if number < 1e6 else f"{number:.2g}"


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
