"""What one number of the campaign draws: a strategy, and the bit that flips.

Invariants: a case is a pure function of its number, and is made of literals.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

STEPS, RANKS = 40, 2
KINDS = ("parameters", "optimizer", "payload", "payload without checksums")
STRATEGIES = ("allreduce()", "allreduce(codec=topk())", "sharded(replicas=2)")
IN_NUMBERS = (
    "allreduce()",
    "sharded(replicas=2)",
)  # a codec's message is no gradient any more where a bit is wrong
OPTIMIZERS = ("momentum", "rmsprop")
MESSAGES = 6  # of the next ones


class Case(NamedTuple):
    """One run with one flip; `options`: of the run, and whether what ranks exchange travels in messages of ours."""

    number: int
    kind: str
    strategy: str
    optimizer: str
    order: str
    options: dict[str, Any]


def draw(number: int) -> Case:
    """The case of a number; kinds take turns."""
    chance, kind = random.Random(f"flip {number}"), KINDS[number % len(KINDS)]
    in_payload = kind.startswith("payload")
    strategy, optimizer = chance.choice(IN_NUMBERS if in_payload else STRATEGIES), chance.choice(OPTIMIZERS)
    at_step = chance.randrange(1, STEPS - MESSAGES if in_payload else STEPS)
    tensor = chance.randrange(MESSAGES if in_payload else 1 << 20)
    order = (
        f"flip(worker={chance.randrange(RANKS)},at_step={at_step},what={kind.split()[0]!r},tensor={tensor},"
        f"bit={chance.randrange(1 << 40)})"
    )
    options = {"compare_every": chance.choice((1, 4, 16, 100)), "go_back": True}
    options |= {"checksums": kind == "payload", "in_messages": in_payload}
    return Case(number, kind, strategy, optimizer, order, options)
