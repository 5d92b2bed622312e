"""What is said of ranks that wait for what nobody will send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpitrain.effects import Recv, Send

MOST_NAMED = 16  # ranks in one report


class Waits(NamedTuple):
    """A rank, what it waits for, since when, and what it has sent last."""

    rank: int
    awaited: Recv
    since_s: float
    last_sent: Send | None


def deadlock(now_s: float, named: Sequence[Waits], num_waiting: int) -> str:
    """Who waits for what, from whom and since when; `named`: of so many that wait."""
    rows = [_told(one) for one in named]
    if num_waiting > len(named):
        rows.append(f"and {num_waiting - len(named)} more")
    return f"deadlock at t={now_s:.3f} s, nobody will send what is waited for: " + "; ".join(rows)


def _told(waits: Waits) -> str:
    awaited, sent = waits.awaited, waits.last_sent
    sources = sorted(awaited.sources)
    found = f"rank {waits.rank} waits since t={waits.since_s:.3f} s for {awaited.kind or 'any message'}"
    if sources:
        named = ", ".join(map(str, sources[:MOST_NAMED])) + ", ..." * (len(sources) > MOST_NAMED)
        found += f" from rank{'s' * (len(sources) > 1)} {named}"
    if sent is not None:
        found += f" (last sent: {type(sent.message).__name__} to rank {sent.to})"
    return found
