"""The sections of `benchmarks/README.md` on whether jobs reach their targets, and how they bear stale gradients."""

from __future__ import annotations

from collections.abc import Callable

from docs.markdown import table
from pages.rows import newest, origin, spread


def literature() -> str:
    found = newest("literature", "job", "strategy")
    head = ("`mpitrain launch`", "target", "reached", "samples to it", "seconds to it", "at the end")
    body = []
    for row in found.values():
        met = row["to_target"] or {}
        goals = ", ".join(
            f"{name} {goal if isinstance(goal, str) else f'>={goal:g}'}"
            for name, goal in row["target"].items()
        )
        body.append((
            f"`{row['launch'].removeprefix('mpitrain launch ')}`",
            goals,
            f"{row['num_met']} of {row['num_runs']}",
            *(f"{met[key]:,.0f}" if met else "-" for key in ("samples", "seconds")),
            ", ".join(f"{name} {row['metrics'][name]['mean']:.3f}" for name in row["target"]),
        ))  # fmt: skip
    loads = [row["load_before"] for row in found.values()]
    told = f"The load of the machine before the runs was {min(loads):.1f} to {max(loads):.1f}."
    return f"{table(head, *body)}\n\n{told}\n\n{origin(*found.values())}"


def staleness_sensitivity() -> str:
    found = newest("staleness_sensitivity", "epochs", "rate", "job")
    counts = list(next(iter(found.values()))["workers"])
    head = (
        "job, epochs, seeds",
        "rate",
        "figure",
        *(f"{count} worker{'s' * (count != '1')}" for count in counts),
    )
    body = []
    for (epochs, rate, job), row in sorted(
        found.items(), key=lambda one: (-one[0][0], -one[0][1], one[0][2])
    ):
        runs = [row["workers"][count] for count in counts]
        figures = {
            "loss (of all seeds)": [spread([run["loss"], *run["range"]], 3) for run in runs],
            "relative increase": [f"{100 * run['increase']:+.0f} %" for run in runs],
            "lost of what one worker learns": [f"{100 * run['lost']:+.0f} %" for run in runs],
        }
        name = (f"{job}, {epochs}, {row['rounds']}", "its own" if rate == 1 else f"{rate:g} of it")
        body += [(*name, figure, *values) for figure, values in figures.items()]
    return table(head, *body) + "\n\n" + origin(*found.values())


PROGRAMS: dict[str, Callable[[], str]] = {
    "literature": literature,
    "staleness_sensitivity": staleness_sensitivity,
}
