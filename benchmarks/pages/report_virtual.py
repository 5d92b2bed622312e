"""The sections of `benchmarks/README.md` on virtual time: what it costs, what it says of published curves, and whether
what it predicts is what happens.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence

from measuring.measurement import ROOT

from docs.markdown import table
from pages.rows import Row, one, origin, rows_of, shown, spread

sys.path.insert(0, str(ROOT / "benchmarks" / "prediction"))
from prediction import SHARINGS, STEP_ERROR, TARGET_ERROR, judged, newest


def virtual_speed() -> str:
    row = one("virtual_speed")
    pushes, steps = row["async"], row["allreduce"]
    head = ("run without gradients", "CPU seconds", "us a push", "us an event", "over a heap alone (95 %)")
    body = [
        (
            f"`async()`, {pushes['workers']} workers, {pushes['pushes']:,} pushes",
            f"{statistics.median(pushes['cpu_s']):.1f}",
            f"{pushes['us_a_push']:.0f}",
            f"{pushes['us_an_event']:.1f}",
            spread(pushes["over_heap"], 1),
        ),
        (
            f"`allreduce()`, {steps['ranks']:,} ranks, {steps['steps']} steps",
            f"{statistics.median(steps['cpu_s']):.1f}",
            "-",
            "-",
            "-",
        ),
    ]
    return table(head, *body) + "\n\n" + origin(row)


def published() -> str:
    rows = list({row["curve"]: row for row in rows_of("published")}.values())
    shown("published", *rows)
    head = (
        "curve",
        "published",
        "simulated",
        "",
        "criterion",
        "most sensitive to",
        "result at half and at twice of it",
    )
    body = [
        (
            row["curve"],
            row["published"],
            row["shown"],
            "hit" if row["hit"] else "**miss**",
            row["criterion"],
            row["most_sensitive"] or "none",
            " - ".join(f"{end:.3g}" for end in sorted(row["sensitivity"].get(row["most_sensitive"], ()))),
        )
        for row in rows
    ]
    hits = sum(row["hit"] for row in rows)
    others = [
        f"{row['curve']}: {value:.3g}x with `{rule}()` in place of `{row['strategy']}()`."
        for row in rows
        for rule, value in row["other_rule"].items()
    ]
    told = (
        f"{hits} of {len(rows)} hit. The assumptions with their sources stand in `published_assumptions.py`."
    )
    return "\n\n".join([table(head, *body), " ".join([told, *others]), origin(*rows)])


def _pairs(sharing: str) -> list[tuple[Row, Row]]:
    found = newest(list(rows_of("prediction")), sharing)
    shown("prediction", *(row for pair in found for row in pair))
    return found


def prediction() -> str:
    texts = []
    for sharing in SHARINGS:
        conditions = judged(_pairs(sharing))
        if not conditions:
            continue
        names = list(conditions[0]["rules"])
        head = (
            f"predicted over measured, links {sharing}",
            *(f"{one['rate']}, {one['spread']}" for one in conditions),
        )
        body = [
            (f"`{name}`", *(f"{100 * one['rules'][name]['step']:+.0f} %" for one in conditions))
            for name in names
        ]
        rules = [rule for one in conditions for rule in one["rules"].values()]
        steps = [abs(rule["step"]) for rule in rules]
        targets = [abs(rule["target"]) for rule in rules if rule["target"] is not None]
        right = sum(one["loss"] <= 0.05 for one in conditions)
        texts.append(table(head, *body))
        texts.append(
            f"Time of a step: mean error {100 * statistics.mean(steps):.1f} %, median "
            f"{100 * statistics.median(steps):.1f} % (wanted: a mean of at most {100 * STEP_ERROR:.0f} %). Time to the "
            f"target: median error {100 * statistics.median(targets):.0f} %, "
            f"{sum(one <= TARGET_ERROR for one in targets)} of {len(targets)} within {100 * TARGET_ERROR:.0f} %. The "
            f"rule that was predicted to be the best is at most 5 % slower than the best in {right} of "
            f"{len(conditions)} conditions."
        )
    replayed = {row["rate"]: row for row in rows_of("prediction") if row["kind"] == "replayed"}
    if replayed:
        head = ("replayed from its trace, over the run", *replayed)
        names = list(next(iter(replayed.values()))["rules"])
        texts.append(
            table(
                head,
                *(
                    (
                        f"`{name}`",
                        *(f"{100 * row['rules'][name]['error']:+.0f} %" for row in replayed.values()),
                    )
                    for name in names
                ),
            )
        )
    rows = [row for sharing in SHARINGS for pair in _pairs(sharing) for row in pair]
    return "\n\n".join([*texts, origin(*sorted(rows, key=lambda row: row["date"])[-1:], *replayed.values())])


_AS_ROOT = "sudo .venv/bin/python benchmarks/prediction/prediction.py"

PROGRAMS: dict[str, tuple[Sequence[str], Callable[[], str]]] = {
    "virtual_speed": (["python benchmarks/virtual_speed.py"], virtual_speed),
    "published": (["python benchmarks/published/published.py"], published),
    "prediction": (
        [
            f"{_AS_ROOT} predict",
            f"{_AS_ROOT} run",
            "python benchmarks/prediction/prediction.py compare",
            f"{_AS_ROOT} replay",
        ],
        prediction,
    ),
}
