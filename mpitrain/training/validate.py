"""Validation of options: what is asked of a run besides its strategy, and refused where the strategy cannot do it.

Invariants: an option that would have no effect is an error, in the dry run as in the run.
"""

from __future__ import annotations

from mpitrain.errors import UsageError
from mpitrain.inject import AtWorker, KillAtEnd, Nan, SlowReader, Torn, check_real, check_workers
from mpitrain.job import Job, Overrides
from mpitrain.reporting.listeners import MLLOG, check_installed, read_logs
from mpitrain.roles.server.fault_tolerant import MOST_NONFINITE
from mpitrain.strategies.allreduce import AllReduce
from mpitrain.strategies.base import ServerStrategy
from mpitrain.strategies.decentralized import Decentralized
from mpitrain.strategies.model_parallel.base import Split
from mpitrain.strategies.validation_policy import read_validation_policy

UNUSED_IN_PARTS = (
    "allreduce() cannot accumulate where the loss leaves out parameters in some batches: DDP exchanges the gradients "
    "of those that the last batch uses; give a larger batch_size, or use sync()"
)


def validate_run(job: Job, overrides: Overrides, num_workers: int) -> None:
    """Raise `UsageError` for options and injections that the job's strategy cannot carry out."""
    check_real(overrides.injections)
    check_workers(overrides.injections, num_workers)
    check_installed(read_logs(job.log))
    _check_pushes(job, overrides)
    _check_clipping(job)
    _check_accumulation(job)
    _check_batch_statistics(job)
    _check_joint_steps(job)
    _check_patience(job)
    _check_sums(job)
    if overrides.heartbeat_s is not None and not isinstance(job.strategy, ServerStrategy):
        raise UsageError(
            f"--heartbeat-s is how long a server waits for a silent worker, and {job.strategy} has no servers: leave "
            "it out, or choose a strategy with servers"
        )
    if overrides.heartbeat_s is not None and getattr(job.strategy, "needs_all", False):
        raise UsageError(
            f"--heartbeat-s is how long a silent worker keeps its part, and {job.strategy} cannot go on without one: "
            "leave it out, or use sync()"
        )
    if not isinstance(job.strategy, Split):
        return
    job.strategy.check_batch(job.batch_size)
    if any(isinstance(one, AtWorker) for one in overrides.injections):
        raise UsageError(
            f"--inject delays or fails workers that hold whole models, and those of {job.strategy} hold parts: leave "
            "it out, or choose a strategy whose workers hold whole models"
        )


def validate_simulation(job: Job, overrides: Overrides) -> None:
    """Raise `UsageError` for what would have no effect in virtual time."""
    check_installed(read_logs(job.log))
    if MLLOG in read_logs(job.log):
        raise UsageError(
            "log='mllog' holds times of a clock on the wall, and a simulation has none: leave it out"
        )
    _check_pushes(job, overrides)
    _check_clipping(job)
    _check_accumulation(job)
    _check_batch_statistics(job)
    _check_joint_steps(job)
    check_precision(job, on_cuda=False)
    _check_patience(job)
    _check_sums(job)
    if read_validation_policy(job.validate_every).seconds:
        raise UsageError(
            f"validate_every={job.validate_every!r} counts seconds of a clock, and virtual time has none: count epochs "
            "or samples"
        )


def _check_patience(job: Job) -> None:
    if job.patience is not None and job.strategy is not None and (why_not := job.strategy.why_not_ended()):
        raise UsageError(f"{job.strategy}: {why_not}")


def _check_sums(job: Job) -> None:
    if job.on_nonfinite == "skip" and getattr(job.strategy, "sums_on_nodes", False):
        raise UsageError(
            f'on_nonfinite="skip" has servers give up a worker that sends {MOST_NONFINITE} such gradients in a row, '
            f'and {job.strategy} has what it sends in a sum with others: use "stop", or leave aggregate out'
        )


def _check_clipping(job: Job) -> None:
    if job.strategy is None or job.clip_norm is job.clip_value is None:
        return
    if why_not := job.strategy.why_not_clipped(by_norm=job.clip_norm is not None):
        raise UsageError(f"{job.strategy}: {why_not}")


def _check_accumulation(job: Job) -> None:
    if job.strategy is None or job.accumulate == 1:
        return
    if why_not := job.strategy.why_not_accumulated():
        raise UsageError(f"{job.strategy}: accumulate={job.accumulate}: {why_not}")
    if isinstance(job.strategy, AllReduce) and job.find_unused_parameters:
        raise UsageError(UNUSED_IN_PARTS)


def _check_batch_statistics(job: Job) -> None:
    if (
        job.sync_batchnorm
        and job.strategy is not None
        and (why_not := job.strategy.why_not_batch_statistics())
    ):
        raise UsageError(f"{job.strategy}: sync_batchnorm: {why_not}")


def _check_joint_steps(job: Job) -> None:
    if job.step is not None and job.strategy is not None and (why_not := job.strategy.why_not_joint_steps()):
        raise UsageError(f"{job.strategy}: several optimizers: {why_not}")


def check_precision(job: Job, on_cuda: bool) -> None:
    """Raise `UsageError` where a rank cannot compute in the job's precision."""
    if job.precision != "float16":
        return
    if not on_cuda:
        raise UsageError(
            'precision="float16" (--precision) scales the loss on a CUDA device, and this run computes on a CPU: use '
            '"bfloat16", which needs no scale'
        )
    if isinstance(job.strategy, AllReduce) and not job.strategy.codec.is_none:
        raise UsageError(
            f'{job.strategy}: a codec keeps what it does not send, and with precision="float16" that would be of '
            'gradients that have overflowed: use "bfloat16"'
        )


def _check_pushes(job: Job, overrides: Overrides) -> None:
    for one in overrides.injections:
        if isinstance(one, KillAtEnd | Nan | Torn) and not isinstance(job.strategy, ServerStrategy):
            raise UsageError(f'--inject "{one}": this needs a server, and {job.strategy} has none')
        if isinstance(one, SlowReader) and not isinstance(job.strategy, ServerStrategy | Decentralized):
            raise UsageError(
                f'--inject "{one}": workers of {job.strategy} meet in collectives, and are sent no messages that '
                "could be read late: order slow(...) or pause(...)"
            )
