"""What one seed draws: a strategy, sizes, speeds, a network, and the starts of a run with what befalls each of them.

Invariants: a course is a pure function of its seed, and is made of literals, so that it prints as what makes it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from mpitrain.virtual import Constant, Exponential, LogNormal
from tests.virtual.course import on_servers
from tests.virtual.legs import COURSE

LAWS = {
    "even": Constant(1.0, 0.0), "spread": Constant(1.0, 0.3), "exponential": Exponential(),
    "heavy": LogNormal(1.0, 1.0),
}  # fmt: skip
LIMITS = ((1, None, False), (2, None, True), (2, 7, False), (3, None, False))
MOST_STARTS = 4
NEVER_S = 1e9


@dataclass(frozen=True)
class Start:
    """One start of the run.

    Attributes:
        workers: how many; every: samples between checkpoints; ends_s: when it is told to end.
        kills, naps: (worker's index, number of the message before which it dies, or stands still).
        patient: shards that give up nobody, where the others give up the silent; none: nobody gives up anybody.
    """

    workers: int
    every: int = 3
    ends_s: float = NEVER_S
    kills: tuple[tuple[int, int], ...] = ()
    naps: tuple[tuple[int, int], ...] = ()
    patient: tuple[int, ...] = ()


@dataclass(frozen=True)
class Course:
    """All of it; the last start is left alone, and ends the run."""

    row: str
    servers: int
    seed: int
    law: str = "spread"
    most_s: float = 0.4
    window: int = 256
    batch: int = 1
    batches: int | None = None
    drop_last: bool = False
    starts: tuple[Start, ...] = ()
    last: Start = Start(2, every=0)


def draw(seed: int) -> Course:
    """The course of a seed."""
    chance = random.Random(f"course {seed}")
    row = chance.choice(sorted(COURSE))
    servers = on_servers(COURSE[row](2), chance.choice((1, 1, 2, 3)), 2).servers
    batch, batches, drop_last = chance.choice(LIMITS)
    starts = tuple(_start(chance, row, servers) for _ in range(chance.randrange(MOST_STARTS)))
    workers = _workers(chance, row)
    return Course(
        row, servers, seed, chance.choice(sorted(LAWS)), chance.choice((0.0, 0.4, 2.0)), chance.choice((2, 3, 256)),
        batch, batches, drop_last, starts, Start(workers, every=0),
    )  # fmt: skip


def _workers(chance: random.Random, row: str) -> int:
    return 2 if "blocking" in row else chance.randint(2, 5)  # shards that wait for some of many are refused


def _start(chance: random.Random, row: str, servers: int) -> Start:
    workers = _workers(chance, row)
    victims = chance.sample(range(workers), chance.choice((0, 0, 1, 1, workers - 1)))
    kills = tuple((victim, chance.randrange(40)) for victim in victims)
    start = Start(
        workers, chance.choice((0, 1, 3, 7)), chance.choice((NEVER_S, chance.uniform(0.3, 12.0))), kills
    )
    gives_up = not any(word in row for word in ("pu", "elastic"))
    if gives_up and chance.random() < 0.4:
        sleepers = chance.sample(range(workers), chance.randint(1, workers - 1))
        naps = tuple((sleeper, chance.randrange(30)) for sleeper in sleepers)
        patient = tuple(shard for shard in range(servers) if chance.random() < 0.3) or (servers,)
        start = replace(start, naps=naps, patient=patient)
    return start


def simpler(course: Course) -> list[Course]:
    """Courses in which less happens, the simplest first."""
    found = [
        replace(course, starts=course.starts[:at] + course.starts[at + 1 :])
        for at in range(len(course.starts))
    ]
    plain = {"law": "even", "most_s": 0.0, "window": 256, "batch": 1, "batches": None, "drop_last": False}
    found += [
        replace(course, **{name: value}) for name, value in plain.items() if getattr(course, name) != value
    ]  # type: ignore[arg-type]
    for at, start in enumerate(course.starts):
        calmer = [replace(start, naps=(), patient=()), replace(start, ends_s=NEVER_S)]
        calmer += [
            replace(start, kills=start.kills[:k] + start.kills[k + 1 :]) for k in range(len(start.kills))
        ]
        calmer += [replace(start, naps=start.naps[:k] + start.naps[k + 1 :]) for k in range(len(start.naps))]
        found += [
            replace(course, starts=(*course.starts[:at], one, *course.starts[at + 1 :]))
            for one in calmer
            if one != start
        ]
    return found
