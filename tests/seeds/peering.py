"""Courses of peers: topology, whether they wait for one another, meetings, checkpoints, validations, and starts.

Invariants: a course is a pure function of its seed, and what happens in it a pure function of the course. The death of
a peer ends a start; nobody is given up.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from mpitrain.effects import Break, Sleep
from mpitrain.errors import LostRankError
from mpitrain.reporting.report import NullReport
from mpitrain.roles.peer import Peer, PeerDuties
from mpitrain.roles.peer_checkpoints import PeerCheckpoints
from mpitrain.roles.peer_credits import CREDITS
from mpitrain.strategies import Decentralized, Warmup
from mpitrain.strategies.checkpoint_policy import Cadence, CheckpointPolicy
from mpitrain.strategies.sampling.peer_partition import PeerPartition
from mpitrain.strategies.topology import TOPOLOGIES
from mpitrain.virtual import VirtualWorld
from tests.seeds.courses import LAWS, NEVER_S, Literal
from tests.seeds.judged import Judged
from tests.virtual.legs import SAMPLES, Besides, CheckpointWriter, Disk, Held, charged, interposed
from tests.virtual.worlds import Gradient, Shuffled, by_batch

RATE = 0.25


@dataclass(frozen=True, repr=False)
class PeerStart(Literal, Besides):
    """One start of the run.

    Attributes:
        workers: how many peers; every: samples between checkpoints, every_s: seconds instead; ends_s: when `told` are
            told to end, or all.
        kills, naps: (peer, number of the message before which it dies, or stands still).
        validate_s: seconds between two validations, instead of samples; over_after: the validation that ends the run.
        informs: whether the peers hear of what is measured.
    """

    workers: int = 2
    every: int = 0
    every_s: float = 0.0
    ends_s: float = NEVER_S
    kills: tuple[tuple[int, int], ...] = ()
    naps: tuple[tuple[int, int], ...] = ()
    validate_s: float = 0.0
    over_after: int = 0
    informs: bool = False


@dataclass(frozen=True, repr=False)
class Peering(Literal):
    """All of it; the last start is left alone, and ends the run. `warmup`: peers, and for how many epochs."""

    topology: str
    seed: int
    asynchronous: bool = False
    resync: int = 0
    law: str = "even"
    most_s: float = 0.0
    batch: int = 1
    epochs: int = 2
    steps: int | None = None
    drop_last: bool = False
    warmup: tuple[int, float] | None = None
    starts: tuple[PeerStart, ...] = ()
    last: PeerStart = PeerStart()

    def strategy(self) -> Decentralized:
        """That of all starts."""
        warmup = Warmup(*self.warmup) if self.warmup else Warmup()
        return Decentralized(self.topology, asynchronous=self.asynchronous, resync=self.resync, warmup=warmup)

    def alike(self) -> Peering:
        """One that gives the same: of peers that wait, without what only takes time or begins anew."""
        numbers = {start.workers for start in (*self.starts, self.last)}
        if (
            self.asynchronous
            or len(numbers) > 1
            or any(start.over_after for start in (*self.starts, self.last))
        ):
            return self
        return replace(self, starts=(), law="even", most_s=0.0, last=PeerStart(workers=self.last.workers))

    def play(self) -> list[list[float]]:
        """Run all starts, each from a checkpoint of those before; returns what the peers hold at the end.

        Raises:
            AssertionError: what has to hold does not.
        """
        parts: dict[str, Any] | None = None
        before: Counter[tuple[int, int]] = Counter()  # samples that were trained on before the start
        for start in (*self.starts, self.last):
            one = _Run(self, start, parts, before)
            try:
                returned = one.world.run(
                    {peer.rank: role for peer, role in zip(one.peers, one.roles, strict=True)}
                )
            except LostRankError:
                assert start.kills
            else:
                one.hold(returned)
            if complete := one.disk.whole():
                parts = complete[self.seed % len(complete)]
                before = sum((held["rows"] for _, held in parts.values()), before)
        return [[replica.x for replica in one.replicas]]


class NumberPeer:
    """A peer's model of one number, which names what it sends by sender and step."""

    def __init__(self, rank: int, strategy: Decentralized, made: list[Held]):
        self.rank, self.strategy, self.made = rank, strategy, made
        self.x = self.common = 1.0
        self.delta, self.step_number = 0.0, -1
        self.copies: dict[int, float] = {}
        self.rows: Counter[tuple[int, int]] = Counter()
        self.taken: dict[int, int] = {}  # the step of what was last taken in, by sender
        self.num_taken: Counter[int] = Counter()
        self.heard: list[str] = []

    def _held(self, value: Any) -> Held:
        self.made.append(Held(value))
        return self.made[-1]

    def prefetch(self, lease: Any) -> None:
        pass

    def step(self, turn: Any) -> Gradient:
        lease, self.step_number = turn.lease, turn.step
        self.rows.update((lease.epoch, lease.start + i) for i in range(lease.num_samples))
        self.delta = RATE * by_batch(self.x, lease) * turn.weight
        if self.strategy.mixes:
            self.x -= self.delta
        return Gradient(0.0, lease.num_samples, True, lease.num_samples)

    def update(self) -> Held:
        return self._held((self.rank, self.step_number, self.x if self.strategy.mixes else self.delta))

    def _take(self, payload: Any) -> tuple[int, float]:
        source, step, value = payload.value
        assert step > self.taken.get(source, -1), (
            f"{self.rank} takes step {step} of {source} after {self.taken}"
        )
        assert self.strategy.asynchronous or step == self.step_number
        self.taken[source] = step
        self.num_taken[source] += 1
        payload.release()
        return source, value

    def apply(self, payload: object, num_peers: int) -> None:
        self.x -= self._take(payload)[1] / num_peers

    def copy(self, source: int, payload: object) -> None:
        sender, self.copies[source] = self._take(payload)
        assert sender == source

    def mix(self, rank: int, weights: dict[int, float], rate: float) -> None:
        own = self.copies[rank]
        self.x += sum(
            rate * weight * (self.copies.get(other, self.common) - own)
            for other, weight in sorted(weights.items())
        )

    def end_step(self) -> None:
        pass

    def hear_figures(self, text: str) -> None:
        if text:
            self.heard.append(text)

    def total(self) -> Held:
        return self._held(self.x)

    def add(self, total: Any, other: Any) -> Held:
        total.value += other.value
        other.release()
        return total

    def divide(self, total: Any, count: int) -> Held:
        total.value /= count
        return total

    def settle_mean(self, mean: Any) -> float:
        apart, self.x = abs(self.x - mean.value), mean.value
        self.common = self.x
        self.copies.clear()
        mean.release()
        return apart

    def digest(self) -> str:
        return self.x.hex()

    def validate(self, samples: int | None = None) -> dict[str, float]:
        return {"loss": self.x}

    def statistics(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        copies = dict(self.copies)
        return {"x": self.x, "common": self.common, "copies": copies, "rows": Counter(self.rows)}


class ShareMeasures:
    """A peer's share of a validation names what it is of."""

    def __init__(self, replica: NumberPeer, cadence: Judged):
        self.replica, self.cadence = replica, cadence

    def alone(self, samples: int | None) -> dict[str, float]:
        self.cadence.num_measured += 1
        return {"loss": self.replica.x}

    def show(self) -> Held:
        return self.replica._held(self.replica.x)

    def part_of(self, rank: int, size: int) -> float:
        return 1 / size

    def share(self, rank: int, size: int, shown: Any) -> Held:
        return self.replica._held([(rank, size, shown.value)])

    def join(self, results: list[Any]) -> Held:
        joined = [one for result in results for one in result.value]
        for result in results:
            result.release()
        return self.replica._held(joined)

    def conclude(self, results: list[Any], samples: int | None) -> dict[str, float]:
        found = sorted(one for result in results for one in result.value)
        for result in results:
            result.release()
        assert found == [(rank, found[0][1], self.replica.x) for rank in range(found[0][1])], found
        self.cadence.num_measured += 1
        return {"loss": self.replica.x}


class PeerWriter(CheckpointWriter):
    """Also by the clock, where that is asked for."""

    every_s = written_s = 0.0

    def time_is_up(self) -> bool:
        return 0 < self.every_s <= self.world.now_s - self.written_s

    def save(self, mark: int, role_state: Any, parts: Any) -> None:
        self.written_s = self.world.now_s
        super().save(mark, role_state, parts)


class _Run:
    """One start: its world, peers and disk."""

    def __init__(self, course: Peering, start: PeerStart, parts: dict[str, Any] | None, before: Counter[Any]):
        self.course, self.start, self.before = course, start, before
        self.strategy, self.number = course.strategy(), start.workers
        self.world = VirtualWorld(LAWS[course.law], Shuffled(course.seed, course.most_s), course.seed)
        self.world.charge = charged(replace(start, units=1), course.seed)
        self.disk, self.made = Disk(start.torn), list[Held]()
        self.replicas = [NumberPeer(rank, self.strategy, self.made) for rank in range(self.number)]
        self.peers = [self._peer(rank) for rank in range(self.number)]
        if parts is not None:
            for peer, replica in zip(self.peers, self.replicas, strict=True):
                self._restore(parts, peer, replica)
        self.roles = []
        for peer in self.peers:
            role = interposed(peer.run(), dict(start.kills).get(peer.rank, -1), Break("kill"))
            self.roles.append(
                interposed(role, dict(start.naps).get(peer.rank, -1), Sleep(18.0, interruptible=False))
            )

    def _peer(self, rank: int) -> Peer:
        course, start, world = self.course, self.start, self.world
        told = not self.strategy.never_meets and (not start.told or rank in start.told)
        replica, name = self.replicas[rank], f"peer-{rank}"
        ends_s = start.ends_s if told else NEVER_S
        writer = PeerWriter(self.disk, name, replica.state, world, start.every, ends_s, (), start.last)
        writer.every_s = start.every_s
        policy = CheckpointPolicy() if self.strategy.never_meets else CheckpointPolicy(samples=start.every)
        names = [f"peer-{other}" for other in range(self.number)] if rank == 0 else []
        self.cadence = cadence = Judged(start, lambda: world.now_s)
        measures = ShareMeasures(replica, cadence) if start.units else None
        checkpoints = PeerCheckpoints(writer, names, Cadence(policy), self.strategy.asynchronous)
        partition = PeerPartition(
            SAMPLES, course.epochs, course.batch, self.number, rank, course.steps, course.drop_last,
            self.strategy.warmup,
        )  # fmt: skip
        duties = PeerDuties(checkpoints=checkpoints, validations=cadence, measures=measures)
        return Peer(rank, self.number, self.strategy, partition, replica, NullReport(), duties)

    def _restore(self, parts: dict[str, Any], peer: Peer, replica: NumberPeer) -> None:
        text, held = parts[f"peer-{peer.rank % len(parts)}"]
        peer.restore(json.loads(text))
        at = peer.partition.samples
        policy = peer.checkpoints.cadence.policy
        peer.checkpoints.cadence = Cadence(policy, at)
        peer.checkpoints._due_samples = at
        mean = sum(part["x"] for _, part in parts.values()) / len(parts)
        if len(parts) == self.number:
            replica.x, replica.common, replica.copies = held["x"], held["common"], dict(held["copies"])
        else:
            replica.x = replica.common = mean

    def hold(self, returned: dict[int, Any]) -> None:
        """What has to hold of a start in which nobody has died."""
        peers, first = self.peers, self.peers[0]
        assert len({replica.x for replica in self.replicas}) == 1, (
            "they have met last, and hold different numbers"
        )
        for key in ("steps", "averagings", "batches")[: 3 - bool(self.course.warmup)]:
            assert len({returned[peer.rank][key] for peer in peers}) == 1, key
        assert all(returned[peer.rank]["max_unanswered"] <= CREDITS for peer in peers)
        if self.strategy.graph == "full" and not self.strategy.asynchronous:
            assert len({returned[peer.rank]["digest"] for peer in peers[: first.num_active]}) == 1
        assert len({tuple(replica.heard) for replica in self.replicas}) == 1, "not all have heard the same"
        assert len({peer.checkpoints.ended for peer in peers}) == 1
        under_way = [(rank, one.inbox) for rank, one in self.world._processes.items() if one.inbox]
        assert not under_way and not any(peer._waiting for peer in peers), (
            under_way,
            [p._waiting for p in peers],
        )
        assert all(held.users == 0 for held in self.made), "somebody holds what is over"
        rows = sum((replica.rows for replica in self.replicas), self.before)
        assert set(rows.values()) <= {1}, rows
        assert len(rows) == first.partition.samples
        if not first.checkpoints.ended and self.course.steps is None:
            assert len(rows) + first.partition.num_left_out == SAMPLES * self.course.epochs
        for mark, names in self.disk.listed.items():
            assert self.start.torn or set(names) == set(self.disk.marks[mark]), (mark, names)


def draw(chance: random.Random, seed: int) -> Peering:
    """One of them."""
    asynchronous, numbers = chance.random() < 0.5, chance.choice(((2, 5), (3, 3), (1, 6)))
    steps = chance.choice((None, None, None, 7))
    starts = tuple(_start(chance, numbers) for _ in range(chance.randrange(4)))
    last = replace(_start(chance, numbers), ends_s=NEVER_S, kills=())
    return Peering(
        chance.choice(TOPOLOGIES), seed, asynchronous, chance.choice((0, 0, 1, 2, 5)), chance.choice(sorted(LAWS)),
        chance.choice((0.0, 0.4, 2.0)), chance.choice((1, 2)), chance.choice((2, 2, 8)), steps, chance.random() < 0.3,
        chance.choice((None, None, (1, 0.3), (2, 1.0))), starts, last,
    )  # fmt: skip


def _start(chance: random.Random, numbers: tuple[int, int]) -> PeerStart:
    workers, validates, over = chance.randint(*numbers), chance.random() < 0.6, chance.random() < 0.2
    timed = chance.random() < 0.2
    return PeerStart(
        workers=workers, every=0 if timed else chance.choice((0, 1, 3, 8)), every_s=3.0 if timed else 0.0,
        ends_s=chance.choice((NEVER_S, NEVER_S, chance.uniform(0.3, 12.0))),
        told=chance.choice(((), (chance.randrange(workers),))), last=chance.random() < 0.3,
        kills=((chance.randrange(workers), chance.randrange(60)),) if chance.random() < 0.4 else (),
        naps=((chance.randrange(workers), chance.randrange(30)),) if chance.random() < 0.3 else (),
        disk_s=chance.choice((0.0, 0.0, 0.5, 4.0)), torn=chance.choice(((), (), (chance.randrange(12),))),
        validate=chance.choice((0, 3, 7)) if validates else 0, units=int(validates),
        unit_s=chance.choice((0.0, 0.7)) if validates else 0.0,
        validate_s=2.0 if validates and chance.random() < 0.2 else 0.0,
        over_after=chance.choice((1, 2)) if validates and over else 0, informs=validates and chance.random() < 0.4,
    )  # fmt: skip
