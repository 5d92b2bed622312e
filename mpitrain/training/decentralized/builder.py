"""Builds the peers of a run without servers: under MPI, around a loop of the user's own, and in virtual time.

Invariants: this is the only place that knows which option of a strategy and of a job goes to which part of a peer. What
differs between the three is an argument: a loop of the user's own brings its data, loss and schedule itself, so it has
no job; virtual peers share one module; what is written, reported and measured is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import Optimizer

from mpitrain.job import Job
from mpitrain.model.gradient.accumulation import LeaseReader
from mpitrain.model.recipe import Recipe, brought_by_loop
from mpitrain.model.replicas.peer_replica import PeerReplica
from mpitrain.model.wire.flat import FlatModel
from mpitrain.roles.peer import Peer, PeerDuties
from mpitrain.roles.peer_checkpoints import PeerCheckpoints
from mpitrain.roles.protocols import PeerMeasures, Report
from mpitrain.strategies.decentralized import Decentralized
from mpitrain.strategies.sampling.peer_partition import Endless, PeerPartition
from mpitrain.strategies.validation_policy import ValidationCadence
from mpitrain.training.measure import read_nothing_ahead
from mpitrain.training.recipe import recipe_of

Fetch = Callable[[int, int, int], Any]


@dataclass(eq=False)
class PeerBuilder:
    """The parts of a run of `number` peers.

    Args:
        strategy: of the run.
        job: what is trained; None around a loop of the user's own.
        epoch_samples: in an epoch of the job's training data; num_steps: at which every peer stops, None for whole
            epochs.
    """

    strategy: Decentralized
    number: int
    job: Job | None = None
    epoch_samples: int = 0
    num_steps: int | None = None

    def __post_init__(self) -> None:
        self.recipe = recipe_of(self.job, self.strategy, self.number, self.epoch_samples)

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
        """The model and data of the peer on `rank`; `fetch`, `prefetch`: as of a `LeaseReader`, the other arguments as
        of a `PeerReplica`."""
        gradient, update = self.recipe
        if rank != 0:  # the first peer averages its own parameters
            update = replace(update, ema=None)
        leases = LeaseReader(fetch, prefetch, gradient.part_samples)
        return PeerReplica(
            model, optimizer, self.strategy, rank, Recipe(gradient, update), leases, measure, shared
        )

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
        duties = PeerDuties(
            self.recipe.update.on_nonfinite, self.recipe.gradient.part_samples, checkpoints, validations, measures
        )  # fmt: skip
        return Peer(rank, self.number, self.strategy, self.partition(rank), replica, report, duties)
