"""Periodic averaging in virtual time: what `training/local_sgd/trainer.py` does on a cluster, in one process.

Invariants: it composes. Workers draw their times, averagings are messages round a ring, and parameters are those
of the run over MPI. Every worker has its own module: so many models have to fit into memory.
"""

from __future__ import annotations

from typing import Any

import torch

from mpitrain.job import Job, Overrides
from mpitrain.reporting.report import NullReport
from mpitrain.roles.local_sgd_worker import LocalWorker
from mpitrain.simulation.base import VirtualRun
from mpitrain.simulation.replicas_in_one_process import Table, VirtualReplica, modules_of
from mpitrain.simulation.report import VirtualLog
from mpitrain.strategies.local_sgd import LocalSGD
from mpitrain.strategies.sampling.peer_partition import PeerPartition
from mpitrain.training.measure import MODEL_FILE, build, save_model
from mpitrain.training.validation import make_measure
from mpitrain.virtual import ComputeLaw, NetworkLaw


def simulate_local_sgd(
    job: Job, options: Overrides, number: int, compute: ComputeLaw, network: NetworkLaw
) -> dict[str, Any]:
    """Simulate a job under `localsgd` with `number` workers; returns what `result.json` holds.

    Raises:
        UsageError: a wrong option, or more workers than samples.
    """
    strategy = job.strategy
    assert isinstance(strategy, LocalSGD)
    virtual = VirtualRun(job, options, number, compute, network)
    log, catalogue = virtual.log, virtual.catalogue
    with job.data.reader(catalogue, job.seed) as reader:
        workers, table = _workers(job, options, number, reader, catalogue.num_samples, log)
        returned = virtual.run([worker.run() for worker in workers])
        metrics = table.replicas[0].validate()
    save_model(table.replicas[0].module, virtual.run_dir / MODEL_FILE, {"strategy": str(strategy)})
    failures = sorted(
        (one.failure for one in table.replicas), key=lambda text: (text[:4] != "rank", not text)
    )
    result = virtual.result(table.replicas[0].samples, metrics, failures[0]) | _counted(
        table, workers[0].shares
    )
    drifts = [{"drift": replica.averager.drift} for replica in table.replicas]
    result["ranks"] = [one | drift for one, drift in zip(returned, drifts)]
    log.finish(result)
    return result


def _workers(
    job: Job, options: Overrides, number: int, reader: Any, num_samples: int, log: VirtualLog
) -> tuple[list[LocalWorker], Table]:
    strategy = job.strategy
    assert isinstance(strategy, LocalSGD)
    module, _ = build(job, options.lr, torch.device("cpu"))
    table = Table(strategy, number)
    table.seat(
        [
            VirtualReplica(job, options.lr, own, strategy, table, rank, reader.batch, num_samples)
            for rank, own in enumerate(modules_of(module, number))
        ]
    )
    validation = job.validate.scan() if job.validate else None
    table.measure = make_measure(job, module, validation, torch.device("cpu"))
    workers = []
    for rank, replica in enumerate(table.replicas):
        shares = PeerPartition(
            num_samples, job.epochs, job.batch_size, number, rank, options.steps, job.drop_last
        )
        workers.append(LocalWorker(rank, number, shares, replica, NullReport() if rank else log))
    return workers, table


def _counted(table: Table, shares: PeerPartition) -> dict[str, Any]:
    """The counts of the run, with the keys of a run over MPI."""
    first = table.replicas[0]
    return {
        **first.averager.statistics(),
        "steps": shares.step,
        "samples_left_out": shares.num_left_out,
        "nonfinite": first.nonfinite,
        "accepted": shares.step * table.number - first.nonfinite,
    }
