"""`localsgd()` between threads: the role of a worker, its questions answered by the threads themselves."""

from __future__ import annotations

from mpitrain.training.in_threads.allreduce import run_trainer, threads_of
from mpitrain.training.in_threads.collectives import ThreadCollectives
from mpitrain.training.local_sgd.trainer import LocalSGDTrainer
from mpitrain.training.outcome import RunOutcome
from mpitrain.training.session import Session
from mpitrain.training.synchronous.collectives import GroupCollectives
from mpitrain.training.synchronous.ddp import ParallelModule


def run_local_sgd(session: Session) -> RunOutcome:
    """Train under local SGD; returns what this rank knows of the run."""
    return run_trainer(session, ThreadLocalSGDTrainer)


class ThreadLocalSGDTrainer(LocalSGDTrainer):
    """The run of one of the threads. While all step together, their gradients are averaged after the backward pass."""

    def _make_collectives(self) -> GroupCollectives:
        return ThreadCollectives(threads_of(self.session).sums())

    def _make_first(self) -> ParallelModule | None:
        return None
