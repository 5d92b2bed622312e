"""Runs in virtual time in which all ranks take the same steps: `allreduce()` and the strategies that split the model.

Invariants: batches, random numbers, validations and defaults are those of the run over MPI, so are parameters
(`ranks_in_one_process.py`), and the clock is one of `virtual/lockstep.py`, whatever is computed: a run of the clock
alone gives the same seconds. Every rank draws the times of its batches by its own number, as a worker does elsewhere.
A rank that dies ends the run, as it does over MPI; one that falls silent leaves all others waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpitrain.data.read.batch import cut
from mpitrain.effects import AllReduce as AllReduceEffect
from mpitrain.effects import Break, Compute, Effect, Exchange, Now, drive, together
from mpitrain.errors import DeadlockError, LostRankError, UsageError
from mpitrain.messages import Lease, num_parts
from mpitrain.model.gradient.accumulation import LeaseReader, read_alike
from mpitrain.model.gradient.sparse_gradients import row_bytes, sparse_parameters
from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.model.wire.codec_registry import check_optimizer
from mpitrain.roles.step_worker import AlikeReplica, StepWorker
from mpitrain.simulation.base import VirtualRun
from mpitrain.simulation.checkpoints import StepCheckpoints, parts_in_lockstep
from mpitrain.simulation.collective_costs import Collectives
from mpitrain.simulation.empty import Quiet
from mpitrain.simulation.in_one_process.codecs import CodecsInOneProcess
from mpitrain.simulation.in_one_process.ranks import RanksInOneProcess
from mpitrain.simulation.step_costs import (
    check_split,
    gradient_buckets,
    num_bytes_of,
    overlapped,
    split_schedule,
)
from mpitrain.strategies.allreduce import AllReduce
from mpitrain.strategies.model_parallel.base import Split
from mpitrain.strategies.model_parallel.mesh_layout import Grid
from mpitrain.strategies.model_parallel.pipeline import Pipeline
from mpitrain.strategies.sampling.step_partition import StepCourse, StepPartition, StepTurn
from mpitrain.system.trace import COMMUNICATION, WAIT
from mpitrain.training.measure import read_nothing_ahead
from mpitrain.training.synchronous.stepper import Batch, Parts
from mpitrain.virtual import ComputeLaw
from mpitrain.virtual.compute import WorkerTimes
from mpitrain.virtual.lockstep import Clock, Overlapped, Schedule, Times
from mpitrain.virtual.world import DEADLY


class Draws:
    """The times of batches, each worker's keyed by (seed, worker)."""

    def __init__(self, compute: ComputeLaw, seed: int, number: int):
        self._times = [WorkerTimes(compute, seed, rank) for rank in range(number)]

    def step(self, num_batches: Sequence[int]) -> tuple[Times, Times]:
        """(seconds of the batches before the last one, seconds of the last one), of every rank."""
        before, last = np.zeros(len(self._times)), np.zeros(len(self._times))
        for rank, count in enumerate(num_batches):
            for _ in range(count):
                before[rank] += last[rank]
                last[rank] = self._times[rank].next()
        return before, last


class LockstepRun(AlikeReplica):
    """One run: the replica of the role that takes the steps of all ranks, and the world that answers it.

    Args:
        virtual: its job, ranks and laws; gradients: whether they are computed, or the clock alone runs.
    """

    def __init__(self, virtual: VirtualRun, gradients: bool = True):
        self.virtual, self.gradients = virtual, gradients
        job, number = virtual.job, virtual.number
        self.grid = Grid(tuple((rank,) for rank in range(number)))
        num_samples, window = virtual.catalogue.num_samples, virtual.catalogue.window_samples
        if isinstance(job.strategy, Split):
            self.grid, window = check_split(job, number).grid(virtual.nodes), num_samples
        num_shares = virtual.num_shares = job.run_strategy.num_replicas(number)
        if num_samples < num_shares:
            raise UsageError(
                f"{num_shares} batches a step for {num_samples} training samples: use fewer workers"
            )
        self.owners = [row for _, row in self._rows()]
        partition = StepPartition(num_samples, job.step_samples, num_shares, window, job.drop_last)
        self.steps = StepCourse(partition, job.epochs, virtual.options.steps)
        self.draws = Draws(virtual.compute, job.seed, number)
        self.costs, self.course = Collectives(virtual.network, virtual.nodes), virtual.compute.course
        self.module, optimizer = virtual.build()
        self.rates = Rates(optimizer)
        self.parameters = [one for one in self.module.parameters() if one.requires_grad]
        self.sparse = sparse_parameters(self.module)
        self.buckets = gradient_buckets(self.parameters, self.sparse)
        codec = job.strategy.codec if isinstance(job.strategy, AllReduce) else None
        self.codecs = None
        if codec is not None and not codec.is_none:
            check_optimizer(codec, optimizer)
            self.codecs = CodecsInOneProcess(codec, number, job.seed, self.buckets)
        self.broken: list[tuple[float, int, Break]] = []
        self.ended, self.step_bytes, self.held_until_s = False, 0, 0.0  # the last: a rank, by a checkpoint

    def _rows(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(share, ranks that compute it)."""
        num_shares = self.virtual.num_shares
        rows = self.grid.ranks if num_shares < self.virtual.number else [(one,) for one in range(num_shares)]
        yield from enumerate(tuple(row) for row in rows)

    def run(self) -> dict[str, Any]:
        """Train; returns what `result.json` holds."""
        virtual, job = self.virtual, self.virtual.job
        virtual.start_alike()
        self.stepper = self._make_stepper()
        with job.data.reader(virtual.catalogue, job.seed) as reader:
            part_samples = virtual.recipe.gradient.part_samples
            self.leases = LeaseReader(reader.batch, read_nothing_ahead, part_samples)
            self.stepper.train_all(self.module, self.rates)
            self.clock = Clock(virtual.number, self._schedule())
            self.saving: StepCheckpoints | None = None
            if virtual.checkpoints.are_due:
                grid = self.grid if isinstance(job.strategy, Split) else None
                parts = parts_in_lockstep(virtual.number, virtual.state_bytes, grid, self.codecs is not None)
                self.saving = StepCheckpoints(virtual.checkpoints, parts, lambda: self.stepper.samples)
            self.apply_s = self._apply_s()
            self.set_measure = virtual.measure(self.module) if self.gradients else None
            log = virtual.log if self.gradients else Quiet()
            role = StepWorker(0, self.steps, self, log, job.part_samples, virtual.validations)
            drive(role.run(), self._answer)
            metrics = self._measured(None if self.ended else self.stepper.samples)
        for trace in virtual.world.traces.values():
            trace.write()
        self._pass(virtual.costs.seconds("deliver", num_bytes_of(self.parameters)))
        if self.gradients:
            virtual.save_all(self.module, self.stepper.updates.ema)
        result = virtual.result(self.stepper.samples, metrics, self.stepper.failure) | self._counted()
        virtual.log.finish(result)
        return result

    def _make_stepper(self) -> RanksInOneProcess:
        """Made when it is known whether anything is traced."""
        job, keys = self.virtual.job, [row[0] for _, row in self._rows()]
        return RanksInOneProcess(job, self.virtual.recipe, keys, self.codecs, isinstance(job.strategy, Split))

    def _answer(self, effect: Effect) -> Any:
        """The world of the role: a clock of all ranks at once, at which whatever they exchange has ended."""
        if isinstance(effect, Now):
            return max(self.clock.now_s, self.held_until_s)
        if isinstance(effect, Compute):
            if effect.what == "validate":
                self._pass(self.virtual.costs.seconds("validate", 0.0, size=effect.size))
            return effect.task()
        assert isinstance(effect, AllReduceEffect), (
            f"{effect!r} is none of a worker that steps with all others"
        )
        return drive(effect.reduction.rounds(), lambda task: task())

    # ---- what the role asks for

    @property
    def samples(self) -> int:
        """That all have trained on."""
        return self.stepper.samples

    @property
    def stopped(self) -> bool:
        """Whether a gradient that was not finite ends the run, or a validation has."""
        return bool(self.stepper.failure) or self.ended

    def local_step(self, turn: StepTurn) -> float:
        """The step of all ranks, with all that they exchange in it; returns the loss to report."""
        virtual, clock, stepper, leases = self.virtual, self.clock, self.stepper, turn.leases
        counts = self._num_batches(leases)
        before_s, last_s = self.draws.step(counts)
        before_s = before_s + virtual.costs.seconds("gradient", 0.0) * np.asarray(counts)
        if self.gradients:
            shares = [lease.num_samples for lease in leases]
            parts = [self._parts(lease, turn.largest) for lease in leases]
            value = stepper.step_all_ranks(parts, shares, self._traced(before_s + last_s))
            if self.codecs is not None:
                self.clock.schedule, self.apply_s = self._coded_schedule(self.codecs), self._apply_s()
            elif self.sparse:
                self.clock.schedule, self.apply_s = self._sparse_schedule(), self._apply_s()
        else:
            if virtual.world.traces:
                compute = self._traced(before_s + last_s)
                value = sum(compute(share, float) for share in range(len(leases)))
            value, stepper.step = 0.0, stepper.step + 1
            stepper.samples += turn.num_samples
        computed_s = clock.began_s + before_s + last_s
        ended_s = clock.step(before_s, last_s, self.apply_s)
        self._trace_waits(computed_s, ended_s)
        virtual.world.now_s = ended_s
        virtual.world.num_events += virtual.number
        self._break(ended_s)
        self._took_s = before_s + last_s
        return value

    def reduce_gradients(self) -> None:
        """Done within the step."""

    def statistics(self) -> dict[str, float]:
        """What a codec has to report in a row of progress."""
        return self.codecs.statistics() if self.codecs is not None else {}

    def settle_checkpoint(self) -> None:
        """The step is over and reported."""
        self._inject(self._took_s)
        for rank, held_s in self.saving.write_due().items() if self.saving is not None else ():
            self.clock.sleep(rank, held_s)
            self.held_until_s = max(self.held_until_s, self.clock.now_s + held_s)

    @property
    def validates(self) -> bool:
        """Whether there is something to validate on."""
        return self.set_measure is not None

    @property
    def measured_part(self) -> float:
        """Of the validation set: the first share is the largest."""
        return self.set_measure.part_of(0, self.virtual.num_shares) if self.set_measure is not None else 0.0

    def hear_figures(self, text: str) -> Exchange:
        """All ranks step at the same rates."""
        return together(lambda: self.stepper.updates.pace.hear_figures(text))

    def agree_to_end(self, ends: bool) -> Exchange:
        """There is nobody else to ask."""

        def end() -> None:
            self.ended = self.gradients and ends

        return together(end)

    def _measured(self, samples: int | None) -> dict[str, float]:
        averaged = self.stepper.averaged()
        return self.set_measure(samples, averaged) if self.set_measure is not None else {}

    def _num_batches(self, leases: Sequence[Lease]) -> list[int]:
        """How many times every rank draws: the ranks of one model all compute its batches."""
        size, counts = self.virtual.job.part_samples, [0] * self.virtual.number
        for share, ranks in self._rows():
            for rank in ranks:
                counts[rank] = num_parts(leases[share], size)
        return counts

    def _parts(self, lease: Lease, largest: int) -> Parts:
        """The batches of a share."""
        strategy = self.virtual.job.strategy
        if not isinstance(strategy, Split):
            yield from self.leases.read(lease)
            return
        for batch, num_samples in read_alike(self.leases, lease, largest):
            if isinstance(strategy, Pipeline) and num_samples == self.virtual.job.batch_size:
                yield from _cut(batch, num_samples, strategy.microbatches)
            else:
                yield batch, num_samples

    def _inject(self, took_s: Times) -> None:
        """Sleeps and faults after a step, of the workers that have any."""
        now_s = self.clock.now_s
        for straggler in self.virtual.stragglers:
            if not straggler.is_ordered:
                continue
            step = straggler.step
            seconds = straggler.sleep_s(float(took_s[straggler.worker]))
            for fault in straggler.breaks(step):
                self.broken.append((now_s + fault.after_s, straggler.worker, fault))
            self.clock.sleep(straggler.worker, seconds)
        self._break(now_s)

    def _break(self, now_s: float) -> None:
        """Faults that are due."""
        due = [row for row in self.broken if row[0] <= now_s]
        self.broken = [row for row in self.broken if row[0] > now_s]
        for at_s, rank, fault in sorted(due, key=lambda row: row[:2]):
            self._fail(at_s, rank, fault.how)

    def _fail(self, at_s: float, rank: int, how: str) -> None:
        world = self.virtual.world
        if how in DEADLY and world.outages and world.outages.restart_s:
            world.outages.die(at_s)
            return
        world.now_s = at_s
        if how in DEADLY:
            raise LostRankError(f"rank {rank} died ({how}) at t={at_s:.3f} s, and nobody can go on")
        others = [other for other in range(self.virtual.number) if other != rank]
        raise DeadlockError(
            f"deadlock at t={at_s:.3f} s: ranks {_few(others)} wait since then, in the allreduce of step "
            f"{self.stepper.step}, for rank {rank}, which has fallen silent ({how})"
        )

    # ---- what takes time

    def _schedule(self) -> Schedule:
        virtual, job = self.virtual, self.virtual.job
        if isinstance(job.strategy, Split):
            with_batch = self.leases.fetch(0, 0, min(job.batch_size, virtual.catalogue.num_samples))
            return split_schedule(
                job, self.module, self.grid, self.costs, with_batch, self.course.forward_share
            )
        cast = self.codecs.cast if self.codecs is not None else None
        if cast is None and self.codecs is not None and not self.gradients:
            raise UsageError(
                f"{job.strategy}: how many bytes a codec sends depends on the gradients: leave the codec out, or let "
                "the simulation compute gradients"
            )
        if self.sparse and not self.gradients:
            raise UsageError(
                f"{job.strategy}: how many rows of an embedding with sparse=True are sent depends on the batches: let "
                "the simulation compute gradients"
            )
        buckets = [[self.parameters[index] for index in bucket] for bucket in self.buckets]
        sizes = [num_bytes_of(bucket, cast) for bucket in buckets]
        return self._averaged(sizes, self.codecs is not None and self.codecs.exchanges_at_end)

    def _apply_s(self) -> float:
        """What every step takes after its exchange: the optimizer, and coding, which waits for the last gradient."""
        costs, num_bytes = self.virtual.costs, self._updated_bytes()
        held = num_bytes * len(self.owners) / self.virtual.number  # of each rank, where the model is split
        coded_s, num_decoded = 0.0, 0
        if self.codecs is not None:
            coded_s = costs.seconds("gradient", num_bytes, 0, codes=True)
            num_decoded = self.virtual.number if self.codecs.gathered_bytes else 1
        updated = held if isinstance(self.virtual.job.strategy, Split) else num_bytes
        return coded_s + costs.seconds("apply", updated, num_decoded, codes=self.codecs is not None)

    def _updated_bytes(self) -> int:
        """Of what a step changes: of a table with sparse gradients the rows that were touched last."""
        dense = num_bytes_of([one for one in self.parameters if id(one) not in self.sparse])
        return dense + sum(
            different * row_bytes(self.parameters[index])
            for index, (_, different) in self.stepper.touched.items()
        )

    def _sparse_schedule(self) -> Schedule:
        """Of the step that has just been computed."""
        everybody = range(self.virtual.number)
        sizes, costs = [], []
        for bucket in self.buckets:
            together = [self.parameters[index] for index in bucket]
            if (rows := self.stepper.touched.get(bucket[0])) is None:
                sizes.append(num_bytes_of(together))
                costs.append(self.costs.allreduce(sizes[-1], everybody))
            else:
                sizes.append(min(rows) * row_bytes(together[0]))
                costs.append(
                    self.costs.sparse_allreduce(*rows, len(together[0]), row_bytes(together[0]), everybody)
                )
        self.step_bytes = sum(cost.sent_bytes for cost in costs)
        return overlapped(sizes, costs, self.course)

    def _pass(self, seconds: float) -> None:
        """All ranks do something else."""
        self.clock.now_s = max(self.clock.now_s, self.held_until_s) + seconds
        self.clock.began_s = np.maximum(self.clock.began_s + seconds, self.clock.now_s)
        self.virtual.world.now_s = self.clock.now_s

    def _averaged(self, sizes: Sequence[int], at_end: bool = False) -> Schedule:
        everybody = range(self.virtual.number)
        costs = [self.costs.allreduce(size, everybody) for size in sizes]
        self.step_bytes = sum(cost.sent_bytes for cost in costs)
        return overlapped(sizes, costs, self.course, at_end)

    def _coded_schedule(self, codecs: CodecsInOneProcess) -> Schedule:
        """Of the step that has just been computed."""
        everybody = range(self.virtual.number)
        if not codecs.gathered_bytes:
            return self._averaged(codecs.averaged_bytes, codecs.exchanges_at_end)
        sizes = [8 * len(everybody), codecs.gathered_bytes * len(everybody)]
        costs = [self.costs.allgather(size, everybody) for size in sizes]
        self.step_bytes = sum(cost.sent_bytes for cost in costs)
        return overlapped(sizes, costs, self.course, at_end=True)

    # ---- traces

    def _traced(self, took_s: Times) -> Callable[[int, Callable[[], float]], float]:
        """Computes a share's gradient, and records it for the first rank that does so."""
        world, clock = self.virtual.world, self.clock

        def compute(share: int, task: Callable[[], float]) -> float:
            rank = self.owners[share][0]
            trace = world.traces.get(rank)
            if trace is None:
                return task()
            world.now_s = float(clock.began_s[rank])
            trace.step(self.stepper.step)
            value: float = trace.compute(task)
            world.now_s += float(took_s[rank])
            trace.computed(float(took_s[rank]))
            return value

        return compute

    def _trace_waits(self, computed_s: Times, ended_s: float) -> None:
        world, schedule = self.virtual.world, self.clock.schedule
        exchanged = schedule.spans_s if isinstance(schedule, Overlapped) else []
        for rank, trace in world.traces.items():
            for start_s, end_s, num_bytes in exchanged if trace.recording else ():
                world.now_s = start_s
                land = trace.begin_flight("allreduce", COMMUNICATION, {"bytes": num_bytes})
                world.now_s = end_s
                land()
            if trace.recording and ended_s > computed_s[rank]:
                trace.add("wait for the mean gradient", WAIT, float(computed_s[rank]), ended_s)

    # ---- the outcome

    def _counted(self) -> dict[str, Any]:
        """What the run has come to, as the run over MPI reports it, and what it cost."""
        clock, stepper = self.clock, self.stepper
        counts: dict[str, Any] = {
            "steps": stepper.step,
            "samples_left_out": self.steps.num_left_out,
            "nonfinite": stepper.nonfinite,
            "accepted": stepper.step - stepper.nonfinite,
            "ended_early": self.ended,
            "gradients": self.gradients,
            "compute_s": float(clock.computed_s.mean()),
            "wait_s": float(clock.waited_s.mean()),
            "step_s": clock.now_s / max(1, clock.num_steps),
            "allreduce": {str(size): name for size, name in sorted(self.costs.used.items())},
        }
        if isinstance(self.virtual.job.strategy, AllReduce):
            counts["sent_bytes_a_step"] = self.step_bytes
        if self.codecs is not None:
            counts["codec"] = {"name": str(self.codecs.codec), **self.codecs.statistics()}
        rows = zip(clock.computed_s.tolist(), clock.waited_s.tolist(), strict=True)
        counts["ranks"] = [
            {"rank": rank, "role": "worker", "steps": stepper.step, "compute_s": computed, "wait_s": waited}
            for rank, (computed, waited) in enumerate(rows)
        ]
        return counts


def _cut(batch: Batch, num_samples: int, count: int) -> Parts:
    """A batch in equal microbatches."""
    for piece in cut(batch, count):
        yield piece, num_samples // count


def _few(ranks: Sequence[int]) -> str:
    """Of many ranks the first ones."""
    return (
        str(list(ranks)) if len(ranks) <= 16 else f"{str(list(ranks[:16]))[:-1]}, ... ({len(ranks)} of them)]"
    )


def simulate_lockstep(virtual: VirtualRun, gradients: bool = True) -> dict[str, Any]:
    """Simulate a job under `allreduce()`, `sharded()`, `tensor()` or `pipeline()`; returns what `result.json` holds."""
    return LockstepRun(virtual, gradients).run()
