"""Local SGD in virtual time.

Invariants: it composes. Workers are those of the run over MPI: they draw their times, an averaging takes what its
all-reduce would, and parameters are the same. Every worker has its own module: so many models have to fit into memory.
"""

from __future__ import annotations

from typing import Any

from mpitrain.roles.step_worker import StepWorker
from mpitrain.simulation.base import VirtualRun
from mpitrain.simulation.checkpoints import StepCheckpoints, parts_in_lockstep
from mpitrain.simulation.in_one_process.replicas import MeansInOneProcess, make_replicas
from mpitrain.strategies.local_sgd import LocalSGD
from mpitrain.strategies.sampling.step_partition import StepCourse, StepPartition
from mpitrain.training.local_sgd.replica import LocalReplica


def simulate_local_sgd(virtual: VirtualRun) -> dict[str, Any]:
    """Simulate a job under `localsgd`; returns what `result.json` holds."""
    job, options, number, strategy = virtual.job, virtual.options, virtual.number, virtual.job.strategy
    assert isinstance(strategy, LocalSGD)
    module, _ = virtual.build()
    virtual.start_alike()
    log, num_samples = virtual.log, virtual.catalogue.num_samples
    means = MeansInOneProcess(strategy.wire, number)
    with job.data.reader(virtual.catalogue, job.seed) as reader:
        replicas = make_replicas(job, options.lr, module, means, reader.batch, num_samples, virtual.measure)
        partitions = (
            StepPartition(num_samples, job.step_samples, number, num_samples, job.drop_last, (rank,))
            for rank in range(number)
        )
        courses = [StepCourse(partition, job.epochs, options.steps) for partition in partitions]
        workers = [
            StepWorker(rank, course, replica, log, job.part_samples, virtual.cadence(rank))
            for rank, (course, replica) in enumerate(zip(courses, replicas, strict=True))
        ]
        if virtual.checkpoints.are_due:
            first = replicas[0]
            saving = StepCheckpoints(
                virtual.checkpoints, parts_in_lockstep(number, virtual.state_bytes, apart=True), lambda: first.samples,
                lambda: not first.averager.is_apart,
            )  # fmt: skip
            first.on_settled = saving.write_due
        returned = virtual.run([worker.run() for worker in workers], means.reduce)
        ended = replicas[0].ended
        measure, samples = replicas[0].set_measure, None if ended else replicas[0].samples
        metrics = measure(samples, replicas[0].averaged()) if measure is not None else {}
    virtual.save_all(module, replicas[0].updates.ema)
    failures = sorted((one.failure for one in replicas), key=lambda text: (text[:4] != "rank", not text))
    result = virtual.result(replicas[0].samples, metrics, failures[0]) | _counted(replicas, courses[0])
    result["ended_early"] = ended
    result["ranks"] = [
        row | {"drift": replica.averager.drift} for row, replica in zip(returned, replicas, strict=True)
    ]
    log.finish(result)
    return result


def _counted(replicas: list[LocalReplica], course: StepCourse) -> dict[str, Any]:
    """What the run has come to, as the run over MPI reports it."""
    first = replicas[0]
    return {
        **first.averager.statistics(),
        "steps": course.step,
        "samples_left_out": course.num_left_out,
        "nonfinite": first.nonfinite,
        "accepted": course.step * len(replicas) - first.nonfinite,
    }
