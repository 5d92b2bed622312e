"""Courses of servers and workers: strategy, sizes, speeds, a network, and starts with what befalls each of them.

Invariants: a course is a pure function of its seed, and what happens in it a pure function of the course.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from mpitrain.roles.server import gathering
from mpitrain.strategies import Bounded, Drop, Warmup
from mpitrain.strategies.base import ServerStrategy
from tests.seeds.courses import LAWS, NEVER_S, Literal
from tests.virtual.course import on_servers
from tests.virtual.legs import COURSE, EPOCHS, SAMPLES, Besides, check, run

LIMITS = ((1, None, False), (2, None, True), (2, 7, False), (3, None, False))
WARMUPS = (None, None, None, (1, 0.3), (1, 1.0), (2, 0.5))
MOST_STARTS = 4
NOBODY_LEFT = (
    "no worker is left",
    "no other worker is left",
)  # as may be, where each has died or was given up


@dataclass(frozen=True, repr=False)
class Start(Literal, Besides):
    """One start of the run.

    Attributes:
        workers: how many; servers: how many, 0 for those of the course; every: samples between checkpoints; ends_s:
            when it is told to end.
        kills, naps: (worker's index, number of the message before which it dies, or stands still).
        patient: shards that give up nobody, where the others give up the silent; none: nobody gives up anybody.
    """

    workers: int = 2
    servers: int = 0
    every: int = 0
    ends_s: float = NEVER_S
    kills: tuple[tuple[int, int], ...] = ()
    naps: tuple[tuple[int, int], ...] = ()
    patient: tuple[int, ...] = ()

    @property
    def is_calm(self) -> bool:
        """Whether nobody is lost."""
        return not self.kills and not self.naps


@dataclass(frozen=True, repr=False)
class Serving(Literal):
    """All of it; the last start is left alone, and ends the run. `warmup`: workers, and for how many epochs."""

    row: str
    servers: int
    seed: int
    law: str = "even"
    most_s: float = 0.0
    window: int = 256
    batch: int = 1
    batches: int | None = None
    drop_last: bool = False
    warmup: tuple[int, float] | None = None
    starts: tuple[Start, ...] = ()
    last: Start = Start()

    def strategy(self, start: Start) -> ServerStrategy:
        """That of a start."""
        made = on_servers(COURSE[self.row](2), start.servers or self.servers, 2)
        return replace(made, warmup=Warmup(*self.warmup)) if self.warmup else made

    def alike(self) -> Serving:
        """One that gives the same, however long what takes: where each update waits for all workers."""
        strategy = self.strategy(self.last)
        waits = strategy.lockstep and strategy.num_contributors(5) == 5 and "by speed" not in self.row
        return replace(self, law="even", most_s=0.0) if waits and not self.starts else self

    def play(self) -> list[list[float]]:
        """Run all starts, each from a checkpoint of those before; returns the paths of the shards' numbers.

        Raises:
            AssertionError: what has to hold does not.
        """
        gathering.MOST_WAITING = self.window
        parts, paths = None, []
        for start in (*self.starts, self.last):
            ended = self._run(start, parts)
            failure = next((server.failure for server in ended.servers if server.failure), "")
            assert not failure or any(text in failure for text in NOBODY_LEFT), failure
            assert not failure or start.naps or len(start.kills) == start.workers, failure
            if not failure and not ended.servers[0].checkpoints.ended:
                self._hold(ended, start)
            for store in ended.stores:
                for _, _, rows in store.pieces:
                    assert self.row.startswith("elastic") or set(rows.values()) <= {1}, rows
            if start.is_calm:
                pushed = sum((replica.pushed for replica in ended.replicas), Counter())
                assert set(pushed.values()) <= {1}, f"pushed more than once: {pushed}"
            complete = ended.disk.complete(self.strategy(start).servers)
            parts = complete[self.seed % len(complete)] if complete else parts
            paths += [store.path for store in ended.stores]
        assert not ended.servers[0].checkpoints.ended and not failure
        return paths

    def _run(self, start: Start, parts: Any) -> Any:
        return run(
            self.strategy(start), start.workers, start.kills, parts, start.every, start.ends_s, self.seed, self.batches,
            self.batch, self.drop_last, start.naps, start.patient, LAWS[self.law], self.most_s, start,
        )  # fmt: skip

    def _hold(self, ended: Any, start: Start) -> None:
        """What has to hold of a start that nobody has told to end, and that has not failed."""
        first = ended.servers[0]
        whole = EPOCHS * SAMPLES - first.leases.num_left_out()
        if self.batches is not None:
            whole = first.processed.num_samples()
            assert first.leases.dealer.num_dealt == self.batches
        check(self.row, ended, whole)
        assert all(server.processed == first.processed for server in ended.servers)
        limit = stalest(first.strategy)
        assert all(max(server.counts.staleness, default=0) <= limit for server in ended.servers)
        if not start.naps and len(start.kills) < start.workers:
            by = first.delivered["by"]
            assert ended.replicas[by].values == [store.value for store in ended.stores]
        if start.is_calm and not start.torn and not start.last:  # the end does not wait for the one before
            assert not missing_parts(ended.disk), "one is named before all know of the one before"


def missing_parts(disk: Any) -> set[tuple[int, str]]:
    """Parts of workers that are not there, of checkpoints before one of which the same worker was to write a part."""
    marks, found = sorted(disk.listed), set()
    for mark, later in zip(marks, marks[1:]):
        both = set(disk.listed[mark]) & set(disk.listed[later])
        found |= {(mark, name) for name in both - set(disk.marks[mark]) if name.startswith("worker")}
    return found


def stalest(strategy: ServerStrategy) -> float:
    """What the staleness of no gradient that counts may exceed."""
    if isinstance(strategy, Bounded):
        return strategy.staleness
    if strategy.lockstep:
        return 0
    return strategy.damping.limit if isinstance(strategy.damping, Drop) else float("inf")


def draw(chance: random.Random, seed: int) -> Serving:
    """One of them."""
    row = chance.choice(sorted(COURSE))
    servers = _servers(chance, row)
    batch, batches, drop_last = chance.choice(LIMITS)
    starts = tuple(_start(chance, row, servers) for _ in range(chance.randrange(MOST_STARTS)))
    last = replace(_calm(chance, row), every=chance.choice((0, 0, 3)))
    return Serving(
        row, servers, seed, chance.choice(sorted(LAWS)), chance.choice((0.0, 0.4, 2.0)), chance.choice((2, 3, 256)),
        batch, batches, drop_last, chance.choice(WARMUPS), starts, last,
    )  # fmt: skip


def _servers(chance: random.Random, row: str) -> int:
    return on_servers(COURSE[row](2), chance.choice((1, 1, 2, 3)), 2).servers


def _calm(chance: random.Random, row: str) -> Start:
    """A start in which nobody is lost."""
    workers = (
        2 if "blocking" in row else chance.randint(2, 5)
    )  # shards that wait for some of many are refused
    validates = chance.random() < 0.5
    return Start(
        workers=workers, servers=chance.choice((0, 0, _servers(chance, row))),
        writers=chance.choice(("none", "first", "all")), last=chance.random() < 0.3,
        disk_s=chance.choice((0.0, 0.0, 0.5, 4.0)), validate=chance.choice((0, 3, 7)) if validates else 0,
        units=chance.choice((1, 3, 8)) if validates else 0, unit_s=chance.choice((0.0, 0.1, 0.7)) if validates else 0.0,
    )  # fmt: skip


def _start(chance: random.Random, row: str, servers: int) -> Start:
    start = _calm(chance, row)
    workers, all_ranks = start.workers, start.workers + (start.servers or servers)
    victims = chance.sample(range(workers), chance.choice((0, 0, 1, 1, workers - 1)))
    start = replace(
        start, every=chance.choice((0, 1, 3, 7)), ends_s=chance.choice((NEVER_S, chance.uniform(0.3, 12.0))),
        kills=tuple((victim, chance.randrange(40)) for victim in victims),
        told=chance.choice(((), (), (chance.randrange(all_ranks),))),
        torn=tuple(sorted(chance.sample(range(12), chance.choice((0, 0, 0, 2))))),
    )  # fmt: skip
    gives_up = not any(word in row for word in ("pu", "elastic"))
    if gives_up and chance.random() < 0.4:
        sleepers = chance.sample(range(workers), chance.randint(1, workers - 1))
        naps = tuple((sleeper, chance.randrange(30)) for sleeper in sleepers)
        shards = start.servers or servers
        patient = tuple(shard for shard in range(shards) if chance.random() < 0.3) or (shards,)
        start = replace(start, naps=naps, patient=patient)
    return start
