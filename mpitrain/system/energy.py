"""The energy that a node has used, from what its processors count: RAPL, in /sys/class/powercap.

Invariants: standard library only, and nothing here may end a run: where there are no counters, or they may not be read
(many kernels let only root), there is no figure. Packages and memory are counted, never the platform as a whole, which
contains them, nor GPUs. The counters wrap within minutes, so a thread looks more often than that.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from mpitrain.system import background

POWERCAP = Path("/sys/class/powercap")
_EVERY_S = 30.0  # a counter of 65 kJ, the smallest, takes longer to wrap at up to 2 kW
_COUNTED = ("package-", "dram")


class EnergyMeter:
    """Counts from its start on; one a node.

    Args:
        folder: where the counters are.
    """

    def __init__(self, folder: Path | None = None) -> None:
        folder = folder or POWERCAP
        self._domains = {
            path: size for path in _domains(folder) if (size := _number(path / "max_energy_range_uj"))
        }
        self._last = {path: _number(path / "energy_uj") for path in self._domains}
        self._used_uj = 0
        self._turn = threading.Lock()
        self._over = threading.Event()
        if any(value is not None for value in self._last.values()):
            background.start("energy", self._watch)

    def joules(self) -> float | None:
        """Since the start; None where nothing can be read."""
        self.look()
        readable = [value for value in self._last.values() if value is not None]
        return self._used_uj / 1e6 if readable else None

    def stop(self) -> None:
        """Do not look any more; may be called twice."""
        self._over.set()

    def look(self) -> None:
        """Read all counters once; one that is below its last value has wrapped since."""
        with self._turn:
            for path, size in self._domains.items():
                now, before = _number(path / "energy_uj"), self._last[path]
                if now is not None and before is not None:
                    self._used_uj += now - before if now >= before else now - before + size
                    self._last[path] = now

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            self.look()


def _domains(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        found = [path for path in folder.glob("intel-rapl:*") if _text(path / "name").startswith(_COUNTED)]
        return sorted(found)
    return []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() and len(text) < 20 else None
