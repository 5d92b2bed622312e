"""A plan as text of at most 80 columns.

Invariants: a pure function of what `--json` writes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from mpitrain.simulation.measured_step import spread_text
from mpitrain.system.sizes import counted, significant, size_text

WIDTH, _NAME, _COLUMN, _PER_ROW, _BEST = 80, 34, 9, 5, 8


def plan_text(plan: dict[str, Any]) -> str:
    """All of it."""
    lines = [
        f"{plan['job']}: {plan['samples']} samples, {plan['epochs']} epochs, batch {plan['batch']}",
        f"one device: {significant(plan['one_device_samples_per_s'])} samples/s",
        *_memory(plan["bytes"]),
        *_probe(plan.get("probe")),
        "",
        *_curves(plan, "speed_up", f"speed-up, batch {plan['batch']} per worker"),
        "",
        *_curves(plan, "global_speed_up", f"speed-up, batch {plan['batch']} of all workers together"),
        "",
        *_intervals(plan),
        *_reasons(plan),
        *messages(plan),
        "",
        "advice",
    ]
    for one in plan["advice"]:
        lines += _wrapped(f"  {one['question']:<14} {one['answer']}", 17)
    if "best" in plan:
        lines += ["", *_best(plan["best"])]
    lines += ["", "assumed"]
    for text in plan["assumptions"]:
        lines += _wrapped(f"  {text}", 4)
    return "\n".join(lines)


def _memory(found: dict[str, Any]) -> list[str]:
    state = "unknown" if found["optimizer"] is None else size_text(found["optimizer"])
    text = (
        f"memory per rank: {size_text(found['rank'])} = parameters {size_text(found['parameters'])}, gradients "
        f"{size_text(found['gradients'])}, optimizer {state}, activations {size_text(found['activations'])}"
    )
    lines = [text]
    if found["flops"]:
        lines.append(f"floating-point operations of a batch: {found['flops']:.3g}")
    return [short for line in lines for short in _wrapped(line, 2)]


def _probe(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    return _wrapped(
        f"this host ({found['device']}): forward {1e3 * found['forward_s']:.3g} ms, backward "
        f"{1e3 * found['backward_s']:.3g} ms, optimizer {1e3 * found['optimizer_s']:.3g} ms, reading "
        f"{1e3 * found['read_s']:.3g} ms, server update {1e3 * found['apply_s']:.3g} ms, memory "
        f"{found['bytes_per_s'] / 1e9:.3g} GB/s, medians of {len(found['steps_s'])} steps",
        2,
    ) + _wrapped(spread_text(found), 2)


def _intervals(plan: dict[str, Any]) -> Iterator[str]:
    """Of a probe: how far the speed-ups of the most workers may be off."""
    known = [
        (curve, curve["points"][-1])
        for curve in plan["curves"]
        if "interval" in (curve["points"] or [{}])[-1]
    ]
    if known:
        yield "speed-up on most workers, as far as the probe knows"
    for curve, point in known:
        low, high = point["interval"]
        yield f"  {_short(curve['strategy']):<{_NAME - 2}}{low:>9.2f} to {high:.2f} on {point['workers']}"
    if known:
        yield ""


def _curves(plan: dict[str, Any], key: str, title: str) -> Iterator[str]:
    for first in range(0, len(plan["workers"]), _PER_ROW):
        counts = plan["workers"][first : first + _PER_ROW]
        yield title if first == 0 else ""
        yield f"{'  workers':<{_NAME}}" + "".join(f"{count:>{_COLUMN}}" for count in counts)
        for curve in plan["curves"]:
            points = {point["workers"]: point.get(key) for point in curve["points"]}
            cells = "".join(_cell(points.get(count)) for count in counts)
            yield f"  {_short(curve['strategy']):<{_NAME - 2}}{cells}"


def _cell(value: float | None) -> str:
    return f"{'-' if value is None else format(value, '.2f'):>{_COLUMN}}"


def _reasons(plan: dict[str, Any]) -> Iterator[str]:
    yield f"{'what holds it back':<{_NAME}}{'sigma':>8}{'kappa':>9}{'saturates':>10}  why"
    for curve in plan["curves"]:
        fit = curve["serial_fraction"]
        figures = f"{fit['sigma']:>8.4f}{fit['kappa']:>9.1e}" if fit else f"{'-':>8}{'-':>9}"
        at = curve["saturates_at"] or "-"
        yield f"  {_short(curve['strategy']):<{_NAME - 2}}{figures}{at:>10}  {curve['why']}"[:WIDTH]


def messages(plan: dict[str, Any]) -> Iterator[str]:
    """What a rank sends to other workers, where that is a message to each."""
    for curve in plan["curves"]:
        if curve["points"] and (number := curve["points"][-1].get("messages")):
            point = curve["points"][-1]
            sent = f"{counted(number, 'message')}, {size_text(point['sent_bytes'])}"
            text = (
                f"{curve['strategy']} on {point['workers']}: each rank sends {sent} a step, before any codec"
            )
            yield from _wrapped(text, 2)


def _best(best: dict[str, Any]) -> Iterator[str]:
    rows = best["options"]
    yield f"best by {best['criterion']}"
    yield f"  {'strategy':<32}{'workers':>8}{'samples/s':>10}{'stale':>6}{'epochs':>7}  rate"
    for row in rows[:_BEST]:
        yield (
            f"  {_short(row['strategy']):<32}{row['workers']:>8}{significant(row['samples_per_s']):>10}"
            f"{row['staleness']:>6.3g}{row['epochs']:>7.3g}  {row['learning_rate']}"
        )[:WIDTH]
    if rows[0]["strategy"] == "one device":
        yield "  one device is better"
    if "trained" in best:
        yield from _trained(best)
    elif best["criterion"].startswith("accuracy"):
        yield from _wrapped(
            "  By the papers' rules, no training was simulated: fresh gradients before stale ones, frequent averages "
            "before rare ones, small steps before large ones.",
            2,
        )


def _trained(best: dict[str, Any]) -> Iterator[str]:
    """What training in virtual time has come to, the best first."""
    yield ""
    yield f"  trained in virtual time, {best['metric']} as validated last"
    yield f"  {'strategy':<33}{'workers':>8}{'lr':>9}{'metric':>9}{'at s':>8}{'target s':>10}"
    for row in best["trained"]:
        figures = (("lr", 9), ("value", 9), ("at_s", 8), ("to_target_s", 10))
        cells = "".join(
            f"{'-' if row[key] is None else format(row[key], '.3g'):>{width}}" for key, width in figures
        )
        yield f"  {_short(row['strategy']):<33}{row['workers']:>8}{cells}"[:WIDTH]
        if row["failure"]:
            yield from _wrapped(f"    {row['failure']}", 4)


def _short(text: str) -> str:
    room = _NAME - 3
    return text if len(text) <= room else text[: room - 3] + "..."


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, drop_whitespace=True
    )
