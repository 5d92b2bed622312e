"""What the rows of `held_out.py` say: errors of the step time and of the time to the target, and the choice of a rule.

Invariants: pure functions of rows. Of a cell the first measured row and the newest prediction before it count.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
Key = tuple[int, str]  # number of the condition, rule
MODELS = ("simulate", "plan")
STEP_ERROR, TARGET_ERROR, CHOICE, NUM_RIGHT = 0.10, 0.15, 0.05, 7
NUM_CELLS, NUM_CONDITIONS = 96, 8


def cells_of(rows: Sequence[Row], kind: str) -> dict[Key, Row]:
    """The rows of a kind by cell; of measured ones the first, for a cell is run once."""
    found: dict[Key, Row] = {}
    for row in rows:
        key = row["condition"]["number"], row["rule"]
        if row["kind"] == kind and (kind == "predicted" or key not in found):
            found[key] = row
    return found


def errors(rows: Sequence[Row], model: str, figure: str) -> dict[Key, float]:
    """Predicted over measured, less 1, of the cells of which both are known."""
    predicted, measured = cells_of(rows, "predicted"), cells_of(rows, "measured")
    found = {}
    for key, row in measured.items():
        real = row["measured"][figure]
        said = predicted[key][model][figure] if key in predicted else None
        if said is not None and real is not None:
            found[key] = said / real - 1
    return found


def right_rules(rows: Sequence[Row]) -> dict[int, set[str]]:
    """Of each condition whose rules were all run: those with the shortest time to the target, or within 5 % of it."""
    measured = cells_of(rows, "measured")
    found: dict[int, set[str]] = {}
    for number in sorted({key[0] for key in measured}):
        times = {key[1]: _seconds(row["measured"]) for key, row in measured.items() if key[0] == number}
        best_s = min(times.values())
        if len(times) == NUM_CELLS // NUM_CONDITIONS and best_s < math.inf:
            found[number] = {rule for rule, seconds in times.items() if seconds <= (1 + CHOICE) * best_s}
    return found


def chosen(rows: Sequence[Row], model: str) -> dict[int, str]:
    """The rule that is predicted to be the first to reach the target, by condition."""
    found: dict[int, tuple[float, str]] = {}
    for (number, rule), row in cells_of(rows, "predicted").items():
        seconds = _seconds(row[model])
        if number not in found or seconds < found[number][0]:
            found[number] = seconds, rule
    return {number: rule for number, (_, rule) in found.items()}


def verdict(rows: Sequence[Row], model: str) -> dict[str, Any]:
    """All that is judged of one model; None where nothing is known yet."""
    steps = [abs(one) for one in errors(rows, model, "sample_s").values()]
    targets = [abs(one) for one in errors(rows, model, "to_target_s").values()]
    right, choice = right_rules(rows), chosen(rows, model)
    return {
        "step": statistics.mean(steps) if steps else None,
        "target": statistics.median(targets) if targets else None,
        "num_steps": len(steps),
        "num_targets": len(targets),
        "num_right": sum(choice.get(number) in rules for number, rules in right.items()),
        "num_conditions": len(right),
    }


def always(rows: Sequence[Row]) -> tuple[str, int]:
    """(the rule that is right in the most conditions if it is always named, in how many)."""
    right = right_rules(rows)
    rules = sorted({key[1] for key in cells_of(rows, "measured")})
    counts = {rule: sum(rule in one for one in right.values()) for rule in rules}
    best = max(rules, key=lambda rule: counts[rule], default="")
    return best, counts.get(best, 0)


def told(rows: Sequence[Row], table: Callable[[list[tuple[str, ...]]], str]) -> str:
    """Everything, as text."""
    texts = [f"{len(cells_of(rows, 'measured'))} of {NUM_CELLS} cells run"]
    predicted = cells_of(rows, "predicted")
    numbers = sorted({key[0] for key in predicted})
    rules = list(dict.fromkeys(key[1] for key in predicted))
    for model in MODELS:
        for figure, name in (("sample_s", "step time"), ("to_target_s", "time to the target")):
            found = errors(rows, model, figure)
            lines = [(f"{model}: error of the {name}, %", *map(str, numbers))]
            for rule in rules:
                cells = (found.get((number, rule)) for number in numbers)
                lines.append((rule, *("-" if one is None else f"{100 * one:+.1f}" for one in cells)))
            texts.append(table(lines))
        texts.append(sentence(rows, model))
    rule, count = always(rows)
    texts.append(f"always naming {rule}: right in {count} of {len(right_rules(rows))} conditions")
    return "\n\n".join(texts)


def sentence(rows: Sequence[Row], model: str) -> str:
    """What is judged of a model, in words."""
    found = verdict(rows, model)
    if found["step"] is None:
        return f"`{model}`: no cell was run."
    target = "" if found["target"] is None else (
        f"time to the target: median error {100 * found['target']:.1f} % of {found['num_targets']} cells that reach it "
        f"as predicted (wanted: at most {100 * TARGET_ERROR:.0f}); "
    )  # fmt: skip
    return (
        f"`{model}`: step time: mean error {100 * found['step']:.1f} % of {found['num_steps']} cells (wanted: at most "
        f"{100 * STEP_ERROR:.0f}); {target}the right rule in {found['num_right']} of {found['num_conditions']} "
        f"conditions that were run whole (wanted: {NUM_RIGHT} of {NUM_CONDITIONS})."
    )


def _seconds(figures: Row) -> float:
    return math.inf if figures["to_target_s"] is None else float(figures["to_target_s"])
