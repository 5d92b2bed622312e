"""Courses of workers that take the same steps: how often they average, validations, checkpoints, and starts.

Invariants: a course is a pure function of its seed, and what happens in it a pure function of the course. The death of
a worker ends a start.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

from mpitrain.effects import AllReduce, Break, Exchange, Sleep
from mpitrain.errors import LostRankError
from mpitrain.reporting.report import NullReport
from mpitrain.roles.step_worker import StepWorker
from mpitrain.strategies import LocalSGD
from mpitrain.strategies.sampling.step_partition import StepCourse, StepPartition
from mpitrain.virtual import VirtualWorld
from mpitrain.virtual.all_reduces import AllReduces
from tests.seeds.courses import LAWS, Literal
from tests.seeds.judged import Judged
from tests.virtual.legs import SAMPLES, Besides, CheckpointWriter, Disk, charged, interposed
from tests.virtual.worlds import Shuffled, by_batch

RATE = 0.25


@dataclass(frozen=True, repr=False)
class StepStart(Literal, Besides):
    """One start of the run.

    Attributes:
        workers: how many; every: samples between checkpoints.
        kills, naps: (worker, number of the all-reduce before which it dies, or stands still).
        over_after: the validation that ends the run; informs: whether all hear of what is measured.
    """

    workers: int = 2
    every: int = 0
    kills: tuple[tuple[int, int], ...] = ()
    naps: tuple[tuple[int, int], ...] = ()
    validate_s: float = 0.0
    over_after: int = 0
    informs: bool = False


@dataclass(frozen=True, repr=False)
class Stepping(Literal):
    """All of it; the last start is left alone, and ends the run. `period` and `begin` (steps of an average of
    gradients) count steps, or samples where `unit` says so."""

    period: int
    seed: int
    unit: str = "steps"
    begin: int = 0
    law: str = "even"
    batch: int = 1
    epochs: int = 2
    steps: int | None = None
    window: int = SAMPLES
    drop_last: bool = False
    starts: tuple[StepStart, ...] = ()
    last: StepStart = StepStart()

    def alike(self) -> Stepping:
        """One that gives the same, without what only takes time or begins anew."""
        numbers = {start.workers for start in (*self.starts, self.last)}
        if len(numbers) > 1 or any(start.over_after for start in (*self.starts, self.last)):
            return self
        return replace(self, starts=(), law="even", last=StepStart(workers=self.last.workers))

    def play(self) -> list[list[float]]:
        """Run all starts, each from a checkpoint of those before; returns what the workers hold at the end.

        Raises:
            AssertionError: what has to hold does not.
        """
        parts: dict[str, Any] | None = None
        before: Counter[tuple[int, int]] = Counter()  # samples that were trained on before the start
        for start in (*self.starts, self.last):
            one = _Run(self, start, parts, before)
            try:
                returned = one.world.run(one.roles, AllReduces(range(start.workers), _means))
            except LostRankError:
                assert start.kills
            else:
                one.hold(returned)
            if complete := one.disk.whole():
                parts = complete[self.seed % len(complete)]
                before = sum((held["rows"] for _, held in parts.values()), before)
        return [[replica.x for replica in one.replicas]]


def _means(brought: list[Any]) -> list[Any]:
    """What each is sent of one collective: the mean of numbers, all rows of anything else, or what the first has."""
    (kind,) = {kind for kind, _ in brought}
    values = [value for _, value in brought]
    answer = {"mean": lambda: sum(values) / len(values), "all": lambda: values, "first": lambda: values[0]}[
        kind
    ]()
    return [answer] * len(brought)


def _asks(kind: str, value: Any, take: Any) -> Exchange:
    """One collective, and what is done with its answer."""

    def rounds() -> Generator[Any, Any, Any]:
        take((yield kind, value))

    return Exchange(rounds, lambda: 8.0)


class NumberStepper:
    """A worker's model of one number under local SGD."""

    validates_last = False

    def __init__(self, course: Stepping, start: StepStart, rank: int, cadence: Judged):
        self.strategy = LocalSGD(period=course.period, unit=course.unit, start=course.begin)
        self.memory, self.start, self.rank, self.cadence = self.strategy.begin(), start, rank, cadence
        self.x, self.gradient, self.samples = 1.0, 0.0, 0
        self.rows: Counter[tuple[int, int]] = Counter()
        self.heard: list[str] = []
        self.stopped = self.is_mean = False
        self.measured: list[Any] = []
        self.save: Any = None

    @property
    def is_apart(self) -> bool:
        return self.memory["since"] > 0

    def local_step(self, turn: Any) -> float:
        lease = turn.lease
        self.rows.update((lease.epoch, lease.start + i) for i in range(lease.num_samples))
        self.samples += turn.num_samples
        self.gradient = RATE * by_batch(self.x, lease)
        self.together = self.strategy.averages_gradients(self.memory)
        if not self.together:
            self._move(self.gradient)
        return 0.0

    def _move(self, gradient: float) -> None:
        self.x -= gradient

    def reduce_gradients(self) -> Exchange | None:
        return _asks("mean", self.gradient, self._move) if self.together else None

    def end_step(self, turn: Any) -> Exchange | None:
        return self._averaging() if self.strategy.on_step(self.memory, turn.num_samples) else None

    def _averaging(self) -> Exchange:
        return _asks("mean", self.x, self._take_mean)

    def _take_mean(self, mean: float) -> None:
        self.x = mean
        self.strategy.on_average(self.memory)

    def statistics(self) -> dict[str, float]:
        return {}

    def settle_checkpoint(self) -> None:
        self.save()

    @property
    def validates(self) -> bool:
        return self.start.units > 0

    def reduce_mean(self) -> Exchange | None:
        self.mean = self.x
        return _asks("mean", self.x, lambda mean: setattr(self, "mean", mean)) if self.is_apart else None

    @property
    def measured_part(self) -> float:
        return 1 / self.start.workers

    def measure(self) -> None:
        self.share = (self.rank, self.samples, self.mean)

    def gather_measured(self) -> Exchange:
        return _asks("all", self.share, lambda rows: setattr(self, "measured", rows))

    def conclude(self) -> dict[str, float]:
        assert self.measured == [(rank, self.samples, self.mean) for rank in range(self.start.workers)]
        self.cadence.num_measured += 1
        return {"loss": self.mean}

    def hear_figures(self, text: str) -> Exchange:
        return _asks("first", text, self.heard.append)

    def agree_to_end(self, ends: bool) -> Exchange:
        return _asks("all", ends, lambda rows: setattr(self, "stopped", any(rows)))

    def finish(self) -> Exchange | None:
        return self._averaging() if self.is_apart else None


class _Run:
    """One start: its world, workers and disk."""

    def __init__(
        self, course: Stepping, start: StepStart, parts: dict[str, Any] | None, before: Counter[Any]
    ):
        self.course, self.start, self.before = course, start, before
        self.world = VirtualWorld(LAWS[course.law], Shuffled(course.seed), course.seed)
        self.world.charge = charged(replace(start, units=min(1, start.units)), course.seed)
        self.disk, self.replicas, self.roles = Disk(start.torn), list[NumberStepper](), {}
        self.courses = [self._course(rank, parts) for rank in range(start.workers)]
        for rank, steps in enumerate(self.courses):
            cadence = Judged(start, lambda: self.world.now_s)
            replica = NumberStepper(course, start, rank, cadence)
            self._restore(rank, replica, parts)
            names = [f"rank-{other}" for other in range(start.workers)] if rank == 0 else []
            held = self._held_by(replica)
            writer = CheckpointWriter(self.disk, f"rank-{rank}", held, self.world, start.every, 0.0)
            replica.save = self._saving(writer, replica, steps, names)
            self.replicas.append(replica)
            role = StepWorker(rank, steps, replica, _Quiet(), validations=cadence).run()
            role = interposed(role, dict(start.kills).get(rank, -1), Break("kill"), AllReduce)
            nap = Sleep(18.0, interruptible=False)
            self.roles[rank] = interposed(role, dict(start.naps).get(rank, -1), nap, AllReduce)

    def _course(self, rank: int, parts: dict[str, Any] | None) -> StepCourse:
        course = self.course
        partition = StepPartition(
            SAMPLES, course.batch, self.start.workers, course.window, course.drop_last, (rank,)
        )  # fmt: skip
        steps = StepCourse(partition, course.epochs, course.steps)
        if parts is not None:
            saved = json.loads(parts["rank-0"][0])
            steps.restore(saved["counts"], saved["partition"])
        return steps

    def _restore(self, rank: int, replica: NumberStepper, parts: dict[str, Any] | None) -> None:
        if parts is None:
            return
        held = parts[f"rank-{rank % len(parts)}"][1]
        same = len(parts) == self.start.workers
        replica.x = held["x"] if same else sum(one["x"] for _, one in parts.values()) / len(parts)
        replica.samples, replica.memory = held["samples"], dict(held["memory"])
        if not same:
            replica.strategy.on_average(replica.memory)

    def _held_by(self, replica: NumberStepper) -> Any:
        return lambda: {
            "x": replica.x, "samples": replica.samples, "memory": dict(replica.memory), "rows": Counter(replica.rows),
        }  # fmt: skip

    def _saving(
        self, writer: CheckpointWriter, replica: NumberStepper, steps: StepCourse, names: list[str]
    ) -> Any:
        due = [writer.next_checkpoint_at(replica.samples)]

        def save() -> None:
            steps.partition.settle_step()
            if 0 < due[0] <= replica.samples:
                counts = {"step": steps.step, "left_out": steps.num_left_out}
                state = {"partition": steps.partition.state(), "counts": counts}
                writer.save(replica.samples, state, names)
                due[0] = writer.next_checkpoint_at(replica.samples)

        return save

    def hold(self, returned: dict[int, Any]) -> None:
        """What has to hold of a start in which nobody has died."""
        replicas, first = self.replicas, self.replicas[0]
        assert len({replica.x for replica in replicas}) == 1, (
            "they have averaged last, and hold different numbers"
        )
        assert len({row["steps"] for row in returned.values()}) == 1
        assert len({replica.stopped for replica in replicas}) == 1
        assert len({tuple(replica.heard) for replica in replicas}) == 1, "not all have heard the same"
        rows = sum((replica.rows for replica in replicas), self.before)
        assert set(rows.values()) <= {1}, rows
        assert len(rows) == first.samples
        if not first.stopped and self.course.steps is None:
            assert len(rows) + self.courses[0].num_left_out == SAMPLES * self.course.epochs
        for mark, names in self.disk.listed.items():
            assert self.start.torn or set(names) == set(self.disk.marks[mark]), (mark, names)


class _Quiet(NullReport):
    def pause(self, seconds: float) -> None:
        assert seconds >= 0

    def until_now(self) -> None:
        pass


def draw(chance: random.Random, seed: int) -> Stepping:
    """One of them."""
    numbers, unit = chance.choice(((2, 5), (3, 3), (1, 6))), chance.choice(("steps", "samples"))
    starts = tuple(_start(chance, numbers) for _ in range(chance.randrange(4)))
    last = replace(_start(chance, numbers), kills=())
    return Stepping(
        chance.choice((1, 2, 3, 7)), seed, unit, chance.choice((0, 0, 3)), chance.choice(sorted(LAWS)),
        chance.choice((1, 2)), chance.choice((2, 5)), chance.choice((None, None, None, 7)),
        chance.choice((2, 4, SAMPLES)), chance.random() < 0.3, starts, last,
    )  # fmt: skip


def _start(chance: random.Random, numbers: tuple[int, int]) -> StepStart:
    workers, validates = chance.randint(*numbers), chance.random() < 0.6
    return StepStart(
        workers=workers, every=chance.choice((0, 1, 3, 8)),
        kills=((chance.randrange(workers), chance.randrange(12)),) if chance.random() < 0.4 else (),
        naps=((chance.randrange(workers), chance.randrange(8)),) if chance.random() < 0.3 else (),
        disk_s=chance.choice((0.0, 0.0, 0.5, 4.0)), torn=chance.choice(((), (), (chance.randrange(12),))),
        validate=chance.choice((0, 3, 7)) if validates else 0, units=int(validates),
        unit_s=chance.choice((0.0, 0.7)) if validates else 0.0,
        over_after=chance.choice((0, 0, 0, 1, 2)) if validates else 0, informs=validates and chance.random() < 0.4,
    )  # fmt: skip
