"""The held-out conditions of `held_out.py`, drawn by a seed.

The seed is not chosen: it is the SHA-256 of the name of a commit, the one that `held_out_seed.json` names, which holds
the model, this file and the program. It is known when that commit is made, and cannot be made to come out as wished but
by making the commit again. A later commit publishes it.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

SEED_FILE = Path(__file__).resolve().parent / "held_out_seed.json"
NUM_CONDITIONS = 8
JOBS = ("cnn", "charnn", "nmt", "ranking")
HOSTS = (4, 5, 6)  # one or two of them for servers, where a rule has some: 2 to 6 workers
RATES = ("100mbit", "200mbit", "500mbit", "1000mbit")
STRAGGLERS = ("none", "one worker", "any worker")
FACTORS = (1.5, 2.0, 2.5)  # of a slow batch
CHANCES = (0.05, 0.1, 0.2)  # of one, where any worker may have it


@dataclass(frozen=True)
class Condition:
    """One of them.

    Attributes:
        job: of `held_out_job.py`; hosts: of one rank each; rate: of their links, as `tc` reads it.
        stragglers: who is slow; factor: how many times as long a slow batch takes; chance: of one.
    """

    number: int
    job: str
    hosts: int
    rate: str
    stragglers: str
    factor: float
    chance: float

    def injections(self, base_s: float, num_workers: int) -> tuple[str, ...]:
        """As `--inject` reads them, where a batch takes `base_s`."""
        extra_s = (self.factor - 1) * base_s
        slow = {"none": (), "one worker": (1,), "any worker": range(num_workers)}[self.stragglers]
        return tuple(f"stall(worker={one}, chance={self.chance:g}, seconds={extra_s:g})" for one in slow)

    def compute(self, batch_s: float, base_s: float, jitter: float) -> str:
        """The same as a compute law, for a plan, where a batch takes `batch_s` with all that is not emulated, and what
        is varies by `jitter`."""
        factor = 1 + (self.factor - 1) * base_s / batch_s
        even = f"constant({batch_s!r}, jitter={jitter * base_s / batch_s!r})"
        if self.stragglers == "any worker":
            return f"bernoulli({even}, chance={self.chance:g}, factor={factor!r})"
        return (
            even if self.stragglers == "none" else f"persistent({even}, factors=[1, {factor!r}, 1, 1, 1, 1])"
        )

    def title(self) -> str:
        """In a few words."""
        slow = {
            "none": "even", "one worker": f"one {self.factor:g} times slower",
            "any worker": f"{100 * self.chance:g} % of batches {self.factor:g} times longer",
        }[self.stragglers]  # fmt: skip
        return f"{self.number}: {self.job}, {self.hosts} hosts, {self.rate}, {slow}"


def draw(seed: int) -> list[Condition]:
    """Every job twice, in order; all else by chance."""
    stream = random.Random(seed)
    found = []
    for number in range(NUM_CONDITIONS):
        stragglers = stream.choice(STRAGGLERS)
        found.append(
            Condition(
                number + 1,
                JOBS[number % len(JOBS)],
                stream.choice(HOSTS),
                stream.choice(RATES),
                stragglers,
                stream.choice(FACTORS) if stragglers != "none" else 1.0,
                stream.choice(CHANCES) if stragglers == "any worker" else 1.0,
            )
        )
    return found


def seed_of(commit: str) -> int:
    """What the full name of a commit gives."""
    return int.from_bytes(hashlib.sha256(commit.encode()).digest()[:8], "big")


def published() -> tuple[str, int, list[Condition]] | None:
    """(the model's commit, the seed, the conditions), or None where no seed was published yet."""
    if not SEED_FILE.exists():
        return None
    told = json.loads(SEED_FILE.read_text(encoding="utf-8"))
    commit, seed = told["model_commit"], told["seed"]
    assert seed == seed_of(commit), f"{SEED_FILE} names a seed that is not its commit's"
    return commit, seed, draw(seed)


def publish(commit: str) -> None:
    """Write the seed, and beside it for readers what it draws."""
    seed = seed_of(commit)
    told = {"model_commit": commit, "seed": seed, "conditions": [asdict(one) for one in draw(seed)]}
    SEED_FILE.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
