"""The sections of `benchmarks/README.md` on virtual time: what it costs, what it says of published curves, and whether
what it predicts is what happens.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

from measuring.measurement import ROOT

from docs.markdown import table
from pages.rows import Row, newest, one, origin, rows_of, settings_of, shown, spread

sys.path.insert(0, str(ROOT / "benchmarks" / "prediction"))
from held_out_conditions import Condition
from held_out_conditions import published as published_seed
from held_out_verdict import MODELS, NUM_CELLS, always, cells_of, chosen, errors, right_rules, sentence
from prediction import CHOICE, SHARINGS, STEP_ERROR, TARGET_ERROR, judged, rounds
from prediction import newest as newest_pairs


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
    rows = list(newest("published", "curve").values())
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
    return newest_pairs(list(rows_of("prediction")), sharing)


_TRAINING = (
    "**This is the training set.** These twelve rules under these six conditions have been looked at while the model "
    "was made better, so the errors below are those of a fit, also in rounds that were predicted first. What the model "
    "says of conditions that it has not seen stands under [held_out](#held_out). All rounds that were run, each with "
    "the prediction before it:"
)


def _rounds() -> str:
    """All rounds of the training set, a line each."""
    head = (
        "run from",
        "commit",
        "predicted at",
        "links",
        "conditions",
        "step, mean",
        "target, median",
        "right rule",
    )
    body = []
    for sharing in SHARINGS:
        for pairs in rounds(list(rows_of("prediction")), sharing):
            found = judged(pairs)
            rules = [rule for one in found for rule in one["rules"].values()]
            steps = [abs(rule["step"]) for rule in rules]
            targets = [abs(rule["target"]) for rule in rules if rule["target"] is not None]
            run, said = (
                ", ".join(dict.fromkeys(pair[which]["commit"] for pair in pairs)) for which in (1, 0)
            )
            median = f"{100 * statistics.median(targets):.0f} %" if targets else "-"
            right = f"{sum(one['loss'] <= CHOICE for one in found)} of {len(found)}"
            mean = f"{100 * statistics.mean(steps):.1f} %"
            body.append((pairs[0][1]["date"], run, said, sharing, str(len(pairs)), mean, median, right))
    return table(head, *sorted(body))


def prediction() -> str:
    texts = [_TRAINING, _rounds(), "The newest run of each condition:"]
    shown("prediction", *settings_of("prediction"))
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


def held_out() -> str:
    """The held-out set: what was drawn, predicted and run, and what is judged of it."""
    rows = list(rows_of("held_out"))
    drawn = published_seed()
    assert drawn is not None, "rows of held_out without a seed"
    commit, seed, conditions = drawn
    measured = cells_of(rows, "measured")
    shown("held_out", *settings_of("held_out"))
    how = (
        f"The conditions were drawn by the seed {seed}, the hash of commit {commit[:9]}, which holds the model and the "
        "drawing; the next commit published it, and those after it the predictions. Each cell was run once, of three "
        f"seeds (medians); computing is emulated. **{len(measured)} of {NUM_CELLS} cells run.**"
    )
    texts = [
        how,
        "\n".join(f"- {one.title()}" for one in conditions),
        *(_errors(rows, conditions, model) for model in MODELS),
        _choices(rows, conditions),
    ]
    if len(measured) < NUM_CELLS:
        texts.append("`held_out.py run --record` runs the cells that are left, and no other.")
    newest_rows = {row["commit"]: row for row in measured.values()}
    return "\n\n".join([*texts, origin(*newest_rows.values())])


def _errors(rows: list[Row], conditions: list[Condition], model: str) -> str:
    """Tables of a model's errors, by rule and condition, and the sentence that judges them."""
    rules = list(dict.fromkeys(key[1] for key in cells_of(rows, "predicted")))
    texts = []
    for figure, name in (("sample_s", "step time"), ("to_target_s", "time to the target")):
        found = errors(rows, model, figure)
        head = (f"`{model}` over measured, {name}", *(str(one.number) for one in conditions))
        body = [
            (f"`{rule}`", *(_percent(found.get((one.number, rule))) for one in conditions)) for rule in rules
        ]
        texts.append(table(head, *body))
    return "\n\n".join([*texts, sentence(rows, model)])


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.0f} %"


def _choices(rows: list[Row], conditions: list[Condition]) -> str:
    """Which rule was right, and which were predicted to be."""
    right, named = right_rules(rows), {model: chosen(rows, model) for model in MODELS}
    head = ("condition", "right (within 5 %)", *(f"`{model}` names" for model in MODELS))
    body = [
        (
            str(one.number),
            ", ".join(f"`{rule}`" for rule in sorted(right.get(one.number, ()))) or "not known yet",
            *(f"`{named[model].get(one.number, '-')}`" for model in MODELS),
        )
        for one in conditions
    ]
    rule, count = always(rows)
    told = f"Always naming `{rule}` would have been right in {count} of {len(right)} conditions."
    return table(head, *body) + "\n\n" + told


PROGRAMS: dict[str, Callable[[], str]] = {
    "virtual_speed": virtual_speed,
    "published": published,
    "prediction": prediction,
    "held_out": held_out,
}
