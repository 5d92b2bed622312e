"""Runs in which all ranks take the same steps: how they begin, and who carries them.

Invariants: it only composes; the steps themselves are a trainer's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.model.wire.codec_registry import check_optimizer
from mpitrain.training.fault_tolerance import survives
from mpitrain.training.measure import share_module
from mpitrain.training.outcome import RunOutcome
from mpitrain.training.resuming.initial_weights import build_on_ranks
from mpitrain.training.resuming.resume_options import shapes_of
from mpitrain.training.session import Session, attempt
from mpitrain.training.synchronous.allreduce_record import settle_allreduce
from mpitrain.training.synchronous.joint_steps import JointTrainer
from mpitrain.training.synchronous.recovery_state import RecoveryState
from mpitrain.training.synchronous.trainer import Trainer


def run_allreduce(session: Session) -> RunOutcome:
    """Train synchronously; returns what this rank knows of the run."""
    return run_synchronous(session, JointTrainer if session.job.step else Trainer)


def run_synchronous(session: Session, trainer_class: type[Trainer]) -> RunOutcome:
    """Train with all ranks taking the same number of steps, as `trainer_class` takes them; where the launch
    reports deaths, the others go on."""
    runtime, job = session.runtime, session.job
    module, optimizer, device = shared_model(session)
    rates = Rates(optimizer)
    with job.data.reader(session.catalogue, job.seed) as reader:

        def make(kept: RecoveryState | None) -> Trainer:
            return trainer_class(session, module, rates, reader, device, kept)

        if survives(runtime, session.strategy):
            from mpitrain.training.synchronous.recovery import Survivors

            return Survivors(session, make).run()
        with _group(session):
            trainer = make(None)
            trainer.run()
            return trainer.outcome()


@contextlib.contextmanager
def _group(session: Session) -> Iterator[None]:
    """The default group of torch.distributed, where ranks are processes."""
    if session.runtime.num_threads is not None:
        yield
        return
    from mpitrain.mpi.process_group.process_group import default_group

    with default_group(session.mpi):
        settle_allreduce(session)
        yield


def shared_model(session: Session) -> tuple[nn.Module, torch.optim.Optimizer, torch.device]:
    """Collective: the job's module and optimizer, rank 0's on every rank, and the device they are on."""
    runtime = session.runtime
    device = session.device
    module, optimizer = build_on_ranks(session, device, session.overrides.lr)
    attempt(runtime, lambda: check_optimizer(session.strategy.push_codec, optimizer))
    runtime.compare({"parameters": shapes_of(module)})
    share_module(runtime, module)
    return module, optimizer, device
