"""How far a plan may be off because of what its probe varied by.

Invariants: the figure as probed is one end of an interval, and that of a calm host the other.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from mpitrain.planning.probe import Probed
from mpitrain.planning.scaling import Conditions, Setting, Times, throughput
from mpitrain.system.host_load import HostLoad


def is_loaded(probed: Probed | None) -> bool:
    """Whether others used the host, or its own host, while it was probed."""
    return probed is not None and HostLoad(probed.others_share, probed.steal_share).is_loaded


def calm(conditions: Conditions, probed: Probed) -> Conditions:
    """The same on a host that nobody else uses: batches are as short as the shortest tenth here, and do not vary."""
    shift_s = probed.low_s - probed.gradient_s
    short_s = max(min(probed.steps_s), statistics.median(probed.steps_s) + shift_s)
    return dataclasses.replace(conditions, times=Times((short_s,), conditions.times.seed), even=True)


def add_intervals(curves: list[dict[str, Any]], settings: Sequence[Setting], quiet: Conditions) -> None:
    """To the last point of each curve, the speed-up as probed, and as it would be on a calm host."""
    alone = throughput(Setting("", "allreduce"), quiet, 1)
    for setting, curve in zip(settings, curves, strict=True):
        if curve["points"]:
            point = curve["points"][-1]
            other = throughput(setting, quiet, point["workers"]) / alone
            point["interval"] = sorted((point["speed_up"], other))
