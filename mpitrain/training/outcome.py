"""What one rank knows of a run at its end, and sends to the first one.

Invariants: plain data that JSON can hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunOutcome:
    """Of one rank.

    Attributes:
        detail: its row of `result.json`.
        failure: why the run has failed, as far as this rank knows; empty where it has not.
        requeue: the run was asked to end; unwritten: why its last checkpoint could not be written, or "".
        injected: what was injected into this rank.
        result: what it has to add to `result.json`, on ranks that have anything.
        traced_steps, device, account: what the session adds: how many steps the rank's trace holds, what it computed on
            and its part of the account.
    """

    detail: dict[str, Any]
    failure: str = ""
    requeue: bool = False
    unwritten: str = ""
    injected: Sequence[Any] = ()
    result: dict[str, Any] | None = None
    traced_steps: int | None = None
    device: str = ""
    account: dict[str, Any] = field(default_factory=dict)


def rows_of(outcomes: list[RunOutcome]) -> dict[str, Any]:
    """What the result holds of every rank."""
    return {
        "injected": [row for outcome in outcomes for row in outcome.injected],
        "ranks": [outcome.detail for outcome in outcomes],
    }


def without_rows(result: dict[str, Any]) -> dict[str, Any]:
    """A result as all ranks are given it, as long among many as among few."""
    return {name: value for name, value in result.items() if name not in ("injected", "ranks")}
