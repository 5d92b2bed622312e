"""How busy a host was while something was timed there, and who kept it busy.

Invariants: reads counters of the kernel, and costs nothing between them. Where there are none nothing is known, and
nothing is said.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

OTHERS, STOLEN = 0.25, 0.02  # shares of the processors' time from which a measurement is called loaded


@dataclass(frozen=True)
class HostLoad:
    """Since a `Watch` began: shares of the time of all processors that other processes have used, and that the host of
    a virtual machine has given to others (steal)."""

    others_share: float = 0.0
    steal_share: float = 0.0

    @property
    def is_loaded(self) -> bool:
        """Whether what was timed meanwhile is a measurement of the load, too."""
        return self.others_share >= OTHERS or self.steal_share >= STOLEN

    def told(self) -> str:
        """In one line."""
        used = f"other processes used {self.others_share:.0%} of its processors, steal {self.steal_share:.0%}"
        return f"this host was loaded: {used}" if self.is_loaded else f"this host was quiet: {used}"


class Watch:
    """Counts from now on."""

    def __init__(self) -> None:
        self._began = ticks(), _own_s()

    def load(self) -> HostLoad:
        """Since the beginning."""
        (before, own_before_s), (after, own_s) = self._began, (ticks(), _own_s())
        spent = [now - then for now, then in zip(after, before, strict=True)]
        if sum(spent) <= 0:
            return HostLoad()
        busy = sum(spent) - spent[3] - spent[4] - spent[7]  # without idle, iowait and steal
        own = (own_s - own_before_s) * os.sysconf("SC_CLK_TCK")
        return HostLoad(max(0.0, min(1.0, (busy - own) / sum(spent))), spent[7] / sum(spent))


def _own_s() -> float:
    """Of all threads of this process, and of its children that have ended."""
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


def ticks() -> list[int]:
    """What all processors have spent so far: user, nice, system, idle, iowait, irq, softirq, steal.
    Zeros where that is not known."""
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
        found = [int(word) for word in first[1:9]]
    except (OSError, ValueError, IndexError):
        found = []
    return found if len(found) == 8 else [0] * 8
