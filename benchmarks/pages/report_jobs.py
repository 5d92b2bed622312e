"""The section of `benchmarks/README.md` on the jobs: throughput and time to a target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from docs.markdown import table
from pages.rows import Row, newest, origin


def job_tables() -> str:
    texts, rows = [], [row for _, row in sorted(newest("job_tables", "job", kind="job").items())]
    for row in rows:
        texts.append(_told(row))
        for virtual in (False, True):
            texts += [_throughput(row, virtual), _targets(row, virtual)]
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
        f"`-`: not reached. What is measured over MPI and what is computed in virtual time stand in tables of "
        f"their own, and are not to be compared.{busy}"
    )


def _table(row: Row, head: str, virtual: bool, cell: Callable[[Row], str]) -> str:
    ran = [one for one in row["rows"] if one["virtual"] == virtual]
    columns = list(dict.fromkeys(one["workers"] for one in ran))
    found = {(one["strategy"], one["workers"]): one for one in ran}
    names = dict.fromkeys(one["strategy"] for one in ran)
    body = [(f"`{name}`", *(cell(found[name, number]) for number in columns)) for name in names]
    return table((head, *map(str, columns)), *body)


def _throughput(row: Row, virtual: bool) -> str:
    """Samples a second; in virtual time beside them, in multiples of what fewest virtual workers make."""
    fewest = min((one["workers"] for one in row["rows"] if one["virtual"] == virtual), default=0)
    least = {
        one["strategy"]: one.get("samples_per_second")
        for one in row["rows"]
        if (one["virtual"], one["workers"]) == (virtual, fewest)
    }

    def cell(one: Row) -> str:
        rate, base = one.get("samples_per_second"), least.get(one["strategy"])
        if not rate:
            return "-"
        times = f" ({rate / base:.2f})" if virtual and base and one["workers"] != fewest else ""
        return (f"{rate:.3g}" if rate < 1000 else f"{rate:.0f}") + times

    head = f"virtual samples/s (over {fewest}) on workers" if virtual else "samples/s on workers"
    return _table(row, head, virtual, cell)


def _targets(row: Row, virtual: bool) -> str:
    def cell(one: Row) -> str:
        met: dict[str, Any] | None = one.get("to_target")
        return f"{met['seconds']:.3g} ({met['samples']:.0f})" if met else "-"

    return _table(row, "virtual: target on workers" if virtual else "target on workers", virtual, cell)


PROGRAMS: dict[str, Callable[[], str]] = {
    "job_tables": job_tables,
}
