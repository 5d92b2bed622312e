"""What one seed draws: a family of strategies, and one of its courses.

Invariants: a pure function of the seed.
"""

from __future__ import annotations

import hashlib
import random

from tests.seeds import peering, serving, stepping
from tests.seeds.peering import Peering
from tests.seeds.serving import Serving
from tests.seeds.stepping import Stepping

Course = Serving | Peering | Stepping
FAMILIES = (serving,) * 6 + (peering,) * 3 + (stepping,)


def draw(seed: int) -> Course:
    """The course of a seed."""
    chance = random.Random(f"course {seed}")
    return chance.choice(FAMILIES).draw(chance, seed)


def generator() -> str:
    """Names what draws courses: another name where seeds mean other courses."""
    return hashlib.sha256(repr([draw(seed) for seed in range(200)]).encode()).hexdigest()[:8]
