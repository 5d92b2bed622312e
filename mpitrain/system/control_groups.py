"""Where the limits of this process's control groups, of either version, stand.

Invariants: every group around this process is looked at, since the tightest holds. Folders need not exist. Standard
library only; elsewhere than on Linux there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def groups_around(controller: str) -> Iterator[tuple[Path, int]]:
    """(folder, version) of this process's control groups that deal with `controller`, and of those around them, the
    innermost first. Of version 1 a controller's folder bears its name, or those of all that are mounted with it."""
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, mounted, path = line.split(":", 2)
        if mounted and controller not in mounted.split(","):
            continue
        for root in dict.fromkeys((GROUPS / controller, GROUPS / mounted)) if mounted else (GROUPS,):
            group = root / path.lstrip("/")
            for folder in (group, *(one for one in group.parents if one.is_relative_to(root))):
                yield folder, 1 if mounted else 2
