"""The section of `benchmarks/README.md` on the jobs: throughput and time to a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from docs.markdown import table
from pages.rows import Row, newest, origin


def job_tables() -> str:
    texts, rows = [], [row for _, row in sorted(newest("job_tables", "job", kind="job").items())]
    for row in rows:
        texts += [_told(row), _throughput(row), _targets(row)]
    return "\n\n".join([*texts, origin(*rows)])


def _told(row: Row) -> str:
    goal = ", ".join(
        f"{name} {limit if isinstance(limit, str) else f'at least {limit}'}"
        for name, limit in row["target"].items()
    )
    less = "".join(f", `{name}={value}`" for name, value in row["environment"].items())
    busy = ""
    if row["load"] > 2 * row["num_cores"] and any(not one["virtual"] for one in row["rows"]):
        busy = (
            f" The machine was busy with other work (load {row['load']:.0f} on {row['num_cores']} cores): compare no "
            "runs under MPI with one another."
        )
    return (
        f"**{row['job']}** (`{row['train_args']}`{less}). Samples per second, and seconds (samples) until {goal}; "
        f"`-`: not reached. Columns with a `v` are virtual.{busy}"
    )


def _columns(row: Row) -> list[tuple[int, bool]]:
    return list(dict.fromkeys((one["workers"], one["virtual"]) for one in row["rows"]))


def _table(row: Row, head: str, cell: Callable[[Row], str]) -> str:
    columns = _columns(row)
    found = {(one["strategy"], one["workers"], one["virtual"]): one for one in row["rows"]}
    names = dict.fromkeys(one["strategy"] for one in row["rows"])
    body = [(f"`{name}`", *(cell(found[name, *column]) for column in columns)) for name in names]
    return table((head, *(f"{number}{' v' if virtual else ''}" for number, virtual in columns)), *body)


def _throughput(row: Row) -> str:
    def cell(one: Row) -> str:
        rate = one.get("samples_per_second")
        return f"{rate:.3g}" if rate and rate < 1000 else f"{rate:.0f}" if rate else "-"

    return _table(row, "samples/s on workers", cell)


def _targets(row: Row) -> str:
    def cell(one: Row) -> str:
        met: dict[str, Any] | None = one.get("to_target")
        return f"{met['seconds']:.3g} ({met['samples']:.0f})" if met else "-"

    return _table(row, "target on workers", cell)


PROGRAMS: dict[str, tuple[Sequence[str], Callable[[], str]]] = {
    "job_tables": (["python benchmarks/job_tables.py"], job_tables),
}
