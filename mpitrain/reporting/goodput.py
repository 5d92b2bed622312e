"""What a run's wall time went to, for people: of one that has ended or that still runs, and beside one that nothing has
disturbed.

Invariants: it only reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpitrain.errors import UsageError
from mpitrain.system.sizes import counted, significant
from mpitrain.system.time_spent import FILE, goodput, read_spent

_LEAST_SHARE = 0.005  # to be told in a line
_DISTURBED = ("redone", "restart", "waiting")


def shares_of(found: dict[str, Any]) -> dict[str, float]:
    """The large parts of the wall time, as parts of 1. `found`: of `result.json`."""
    shares = {part: seconds / found["wall_s"] for part, seconds in found["seconds"].items() if seconds}
    return {part: round(share, 3) for part, share in shares.items() if share >= _LEAST_SHARE}


def shares_if_disturbed(found: dict[str, Any]) -> dict[str, float]:
    """The same, of a run that has lost time; of others nothing."""
    return shares_of(found) if found and any(found["seconds"][part] for part in _DISTURBED) else {}


def goodput_of(run_dir: Path) -> dict[str, Any]:
    """What `goodput` of its `result.json` will be, or is, until now.

    Raises:
        UsageError: no run has kept account there.
    """
    found = goodput(read_spent(run_dir))
    if not found or not found["wall_s"]:
        raise UsageError(
            f"{run_dir} says nothing of the time that a run took: it holds no {FILE}, which runs over MPI and in "
            "threads keep from their start on; give the directory that the run has printed as run_dir"
        )
    return found


def goodput_text(run_dir: Path, undisturbed: Path | None = None) -> str:
    """A line for each part, and how many useful samples a second are left, of those of the undisturbed run.

    Raises:
        UsageError: no run has kept account in one of these directories, or the undisturbed one has made nothing.
    """
    found = goodput_of(run_dir)
    rows = [*found["seconds"].items(), ("in all", found["wall_s"])]
    lines = [
        f"{part:<10} {seconds:>10.2f} s {seconds / found['wall_s']:>7.1%}"
        for part, seconds in rows
        if seconds
    ]
    rate = found["samples_per_second"]
    lines.append(
        f"{counted(found['samples_useful'], 'useful sample')}, {found['samples_redone']} done again: "
        f"{significant(rate)} useful samples a second"
    )
    if undisturbed is not None:
        whole = goodput_of(undisturbed)["samples_per_second"]
        if whole <= 0:
            raise UsageError(f"{undisturbed} has made no samples, so there is nothing to compare with")
        lines.append(f"goodput {rate / whole:.3f} of the {significant(whole)} a second of {undisturbed}")
    return "\n".join(lines)
