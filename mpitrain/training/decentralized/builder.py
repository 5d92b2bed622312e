"""Builds the peers of a run without servers: under MPI, around a loop of the user's own, and in virtual time.

Invariants: this is the only place that knows which option of a strategy and of a job goes to which part of a peer. What
differs between the three is an argument: a loop of the user's own brings its data, loss and schedule itself, so it has
no job; virtual peers share one module; what is written, reported and measured is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from mpitrain.job import Job
from mpitrain.model.flat import FlatModel
from mpitrain.model.optimizer import Rates
from mpitrain.model.peer_replica import PeerReplica
from mpitrain.model.precision import loss_scale
from mpitrain.roles.peer import Peer
from mpitrain.roles.peer_checkpoints import PeerCheckpoints
from mpitrain.roles.protocols import PeerMeasures, Report
from mpitrain.strategies.decentralized import Decentralized
from mpitrain.strategies.sampling.peer_partition import Endless, PeerPartition
from mpitrain.strategies.schedules import Progress
from mpitrain.strategies.ticks import Law, Ticks
from mpitrain.strategies.validation_policy import ValidationCadence
from mpitrain.training.clipping import clipping_of
from mpitrain.training.measure import brought_by_loop, read_nothing_ahead
from mpitrain.training.schedule import schedule_of, ticks_of

Fetch = Callable[[int, int, int], Any]


class PeerBuilder:
    """The parts of a run of `number` peers.

    Args:
        strategy: of the run.
        job: what is trained; None around a loop of the user's own.
        epoch_samples: in an epoch of the job's training data; num_steps: at which every peer stops, None for whole
            epochs.
    """

    def __init__(
        self,
        strategy: Decentralized,
        number: int,
        job: Job | None = None,
        epoch_samples: int = 0,
        num_steps: int | None = None,
    ):
        self.strategy, self.number, self.job = strategy, number, job
        self.epoch_samples, self.num_steps = epoch_samples, num_steps
        self.ticks = ticks_of(job, epoch_samples, number) if job else Ticks(1, Law(1, number))

    def replica(
        self,
        rank: int,
        model: FlatModel,
        optimizer: Optimizer,
        fetch: Fetch = brought_by_loop,
        prefetch: Callable[[int, int, int], None] = read_nothing_ahead,
        measure: Callable[[int | None], dict[str, float]] | None = None,
        shared: bool = False,
    ) -> PeerReplica:
        """The model and data of the peer on `rank`; the arguments are those of `PeerReplica`."""
        job = self.job
        return PeerReplica(
            model, optimizer, self.strategy, self.number, rank, job.loss if job else brought_by_loop, fetch,
            prefetch, job.seed if job else 0, measure, shared, self._schedule(optimizer), self.epoch_samples,
            clipping_of(job), job.part_samples if job else 0, loss_scale(job.precision) if job else None,
            ema=job.ema if job and rank == 0 else None,
        )  # fmt: skip

    def _schedule(self, optimizer: Optimizer) -> Progress | None:
        return schedule_of(self.job, Rates(optimizer), self.ticks)

    def partition(self, rank: int) -> PeerPartition | Endless:
        """The peer's part of the data, step by step; without an end where the data are the user's own."""
        job = self.job
        if job is None:
            return Endless(self.number, rank)
        return PeerPartition(
            self.epoch_samples, job.epochs, job.step_samples, self.number, rank, self.num_steps, job.drop_last,
            self.strategy.warmup,
        )  # fmt: skip

    def peer(
        self, rank: int, replica: PeerReplica, report: Report, checkpoints: PeerCheckpoints | None = None,
        validations: ValidationCadence | None = None, measures: PeerMeasures | None = None,
    ) -> Peer:  # fmt: skip
        """The peer on `rank`; `checkpoints`, `validations`, `measures`: as in `Peer`."""
        on_nonfinite = self.job.on_nonfinite if self.job else "stop"
        return Peer(
            rank, self.number, self.strategy, self.partition(rank), replica, report, on_nonfinite, checkpoints,
            self.job.part_samples if self.job else 0,
            validations, measures,
        )  # fmt: skip
