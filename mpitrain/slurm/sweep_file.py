"""The text file of an `array-sweep`: a line of options for each run, as in a shell; blank lines and those that begin
with # do not count.

Invariants: run i of the sweep is the i-th line that counts, from 0, here as in the batch script.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from mpitrain.errors import UsageError

_MAX_BYTES = 2**26


class SweepLine(NamedTuple):
    """One run: its line's number in the file, from 1, and its options."""

    number: int
    words: tuple[str, ...]


def read_sweep(path: Path) -> list[SweepLine]:
    """The runs of a sweep, in order.

    Raises:
        UsageError: the file cannot be read, has no line that counts, or a quote in it does not end.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{path} has more than {_MAX_BYTES} bytes: is it a sweep's file?")
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read the sweep {path}: {getattr(error, 'strerror', None) or error}"
        ) from None
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            found.append(SweepLine(number, tuple(shlex.split(line))))
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: {error}: {line.strip()}") from None
    if not found:
        raise UsageError(f"{path} has no line with options: write one for each run, such as --lr 1e-3")
    return found


def array_of(asked: str | None, num_runs: int) -> str:
    """The indices for `sbatch --array`: all of the sweep's, unless others are asked for.

    Args:
        asked: as for sbatch, such as "0-3,7" or "0-9%4"; "%4" alone is all, 4 at a time.
    Raises:
        UsageError: it is no such text, or there are fewer runs.
    """
    indices, percent, limit = (asked or "").partition("%")
    last = num_runs - 1
    if not indices:
        indices = f"0-{last}" if last else "0"
    elif not re.fullmatch(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*", indices):
        raise UsageError(f"array={asked!r}: indices as for sbatch, such as 0-3,7 or %4")
    most = max(int(number) for part in indices.split(",") for number in part.partition(":")[0].split("-"))
    if most > last:
        raise UsageError(f"array={asked}: the sweep has {num_runs} line(s), so {last} is the last index")
    return indices + percent + limit
