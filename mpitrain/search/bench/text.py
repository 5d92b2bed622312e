"""A benchmark as text of at most 80 columns.

Invariants: a pure function of what `--json` writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpitrain.simulation.comparison_text import NAME, named_row, wrapped
from mpitrain.system.sizes import counted, significant, size_text


def bench_text(found: Mapping[str, Any]) -> str:
    """All of it."""
    rows = [row for row in found["rows"] if row.get("samples_per_second")]
    lines = ["", f"{found['job']}: {found['scaling']} scaling, {found['repeats']} runs of each setting", ""]
    lines += [*_throughput(rows), "", *_targets(rows, found["metric"])]
    if any(row["virtual"] for row in rows):
        lines += ["", *wrapped(f"v: virtual workers, batches take {found['compute']}, messages {found['network']}; "
                               "one run each, of seconds that nobody has waited for")]  # fmt: skip
    if found["verdicts"]:
        lines.append("")
        for verdict in found["verdicts"]:
            lines += wrapped(sentence(verdict))
    for row in found["rows"]:
        for why in reasons(row):
            lines += wrapped(f"{row['strategy']}, {workers_text(row)}: {why}")
    return "\n".join(lines)


def reasons(row: Mapping[str, Any]) -> Iterator[str]:
    """Why a row, or some of its runs, have no figures."""
    if "refused" in row:
        yield row["refused"]
    yield from dict.fromkeys(run["failure"] for run in row.get("runs", ()) if run["failure"])


def _throughput(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield (
        f"{'strategy':<{NAME}}{'workers':>7}{'batch':>7}{'samples/s':>11}{'+-':>6}{'speed-up':>9}{'effic.':>7}"
        f"{'bytes':>8}"
    )
    for row in rows:
        spread = "-" if row["spread"] is None else f"{100 * row['spread']:.0f}%"
        sent = "-" if row["num_bytes"] is None else size_text(int(row["num_bytes"])).replace(" ", "")
        yield from named_row(
            row,
            f"{_workers(row):>7}{row['batch_size']:>7}{significant(row['samples_per_second']):>11}{spread:>6}"
            f"{_scaling(row)}{sent:>8}",
        )


def _scaling(row: Mapping[str, Any]) -> str:
    if row["efficiency"] is None:
        return f"{'-':>9}{'-':>7}"
    return f"{row['speed_up']:>9.2f}{100 * row['efficiency']:>6.0f}%"


def _targets(rows: Sequence[Mapping[str, Any]], metric: str | None) -> Iterator[str]:
    has_energy = any(row["energy_j"] is not None for row in rows)
    yield (
        f"{'strategy':<{NAME}}{'workers':>7}{'target s':>9}{'samples':>9}{'met':>6}{_cut(metric or '-'):>16}"
        + (f"{'energy':>8}" if has_energy else "")
    )
    for row in rows:
        met = row["to_target"]
        cells = f"{significant(met['seconds']):>9}{met['samples']:>9.0f}" if met else f"{'-':>9}{'-':>9}"
        share = f"{row['num_met']}/{row['num_runs']}"
        energy = "-" if row["energy_j"] is None else f"{row['energy_j']:.3g}J"
        yield from named_row(
            row,
            f"{_workers(row):>7}{cells}{share:>6}{_value(row['metrics'].get(metric)):>16}"
            + (f"{energy:>8}" if has_energy else ""),
        )


def _cut(name: str) -> str:
    return name if len(name) < 16 else f"{name[:12]}..."


def _value(one: Mapping[str, object] | None) -> str:
    if one is None:
        return "-"
    return f"{one['mean']:.4f}" + ("" if one["deviation"] is None else f" +-{one['deviation']:.4f}")


def _workers(row: Mapping[str, object]) -> str:
    return f"{row['workers']}{'v' if row['virtual'] else ''}"


def workers_text(row: Mapping[str, Any]) -> str:
    """How many, and whether they are virtual."""
    return counted(row["workers"], "virtual worker" if row["virtual"] else "worker")


def sentence(verdict: Mapping[str, Any]) -> str:
    """A verdict in words."""
    middle, least, largest = verdict["faster"]
    text = f"{workers_text(verdict)}, {verdict['strategy']} against {verdict['against']}: {middle:.2f} times as fast"
    if least != largest:
        text += f" ({least:.2f} to {largest:.2f})"
    if "metric" in verdict:
        gain = verdict["difference"]
        word = "better" if gain > 0 else "worse"
        text += f"; {verdict['metric']} {abs(gain):.4f} {word}" if gain else f"; {verdict['metric']} the same"
        if gain and not verdict["is_clear"]:
            text += " (of one run each)" if verdict["is_clear"] is None else ", no more than seeds may make"
    if verdict["to_target_ratio"] is not None:
        text += f"; target met after {verdict['to_target_ratio']:.2f} times the time"
    return text
