"""The speed-up of a strategy by numbers of workers, and what holds it back.

Invariants: what a strategy refuses for some numbers of workers is left out, and refused where nothing is left.
"""

from __future__ import annotations

from typing import Any

from mpitrain.errors import UsageError
from mpitrain.planning.scaling import MATTERS, NONE, Conditions, Setting, reason, throughput
from mpitrain.virtual.serial_fraction import fit_serial_fraction


def curve(setting: Setting, conditions: Conditions, counts: list[int], batch: int) -> dict[str, Any]:
    """Speed-up over one device, with the batch of every worker constant, and with that of all workers."""
    alone = throughput(Setting("", "allreduce"), conditions, 1)
    rows: list[dict[str, Any]] = []
    refused = ""
    for number in counts:
        if number < setting.needs():
            continue
        try:
            rate = throughput(setting, conditions, number)
        except UsageError as error:  # so many workers, or the job
            refused = str(error)
            continue
        name, gain = reason(setting, conditions, number)
        row = {
            "workers": number,
            "samples_per_s": rate,
            "speed_up": rate / alone,
            "reason": name,
            "gain": gain,
        }
        if setting.strategy is not None and (sends := setting.strategy.messages_to_workers(number)):
            row |= {"messages": sends, "sent_bytes": sends * conditions.num_bytes}
        if number <= batch:
            divided = throughput(setting, conditions, number, batch / number)
            name, gain = reason(setting, conditions, number, batch / number)
            row |= {"global_speed_up": divided / alone, "global_reason": name, "global_gain": gain}
        rows.append(row)
    fit = fit_serial_fraction([(row["workers"], row["speed_up"]) for row in rows])
    most = max((row["speed_up"] for row in rows), default=0.0)
    saturated = next(
        (row for row in rows if row["speed_up"] >= (1 - MATTERS) * most and row is not rows[-1]), None
    )
    if refused and not rows:
        raise UsageError(f"plan: {refused}")
    return {
        "strategy": setting.text,
        "points": rows,
        "serial_fraction": fit._asdict() if fit else None,
        "saturates_at": saturated["workers"] if saturated else None,
        "why": rows[-1]["reason"] if rows else NONE,
    }
