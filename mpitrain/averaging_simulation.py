"""Periodic averaging in virtual time: what `training/localsgd.py` does on a cluster, in one process.

Law of this file: it composes. Workers draw their times, averagings are messages round a ring, and parameters are those
of the run over MPI. Every worker has its own module: so many models have to fit into memory.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

from mpitrain.errors import UsageError
from mpitrain.inject import Straggler, check_workers
from mpitrain.job import Job, Overrides
from mpitrain.peer_simulation import described, judged
from mpitrain.report import NullReport, Report, default_run_dir
from mpitrain.roles.local_worker import LocalWorker
from mpitrain.rules import LocalSGD
from mpitrain.rules.shares import Shares
from mpitrain.training.measure import MODEL_FILE, build, make_measure, save_model
from mpitrain.training.together import LocalReplica, Table, modules_of
from mpitrain.virtual import ComputeLaw, NetworkLaw, VirtualWorld
from mpitrain.virtual_log import VirtualLog


def simulate_averaging(
    job: Job, options: Overrides, number: int, compute: ComputeLaw, network: NetworkLaw
) -> dict[str, Any]:
    """Rehearse a job under `localsgd` with `number` workers; returns what `result.json` holds.

    Raises:
        UsageError: a wrong option, or more workers than samples.
    """
    strategy = job.strategy
    assert isinstance(strategy, LocalSGD)
    if number < 1:
        raise UsageError(f"--workers must be at least 1, got {number}")
    check_workers(options.injections, number)
    catalogue = job.data.scan()
    if catalogue.num_samples < number:
        raise UsageError(
            f"{number} workers for {catalogue.num_samples} training samples: use at most as many"
        )
    run_dir = Path(options.run_dir or default_run_dir(f"{job.name or 'job'}-virtual")).resolve()
    planned = catalogue.num_samples * job.epochs
    if options.steps is not None:
        planned = options.steps * number * job.batch_size
    report = Report(run_dir, planned, quiet=options.quiet, num_epochs=job.epochs)
    world = VirtualWorld(compute, network, job.seed)
    log = VirtualLog(report, world, math.ceil(planned / (job.batch_size * number)), options.quiet)
    stragglers = [Straggler(options.injections, index, job.seed) for index in range(number)]
    started_s = time.monotonic()
    with job.data.reader(catalogue, job.seed) as reader:
        workers, table = _workers(job, options, number, reader, catalogue.num_samples, log)
        returned = world.run({rank: stragglers[rank].wrap(one.run()) for rank, one in enumerate(workers)})
        metrics = table.replicas[0].validate()
    save_model(table.replicas[0].module, run_dir / MODEL_FILE, {"strategy": str(strategy)})
    result = _result(job, options, table, workers[0].shares, metrics) | {
        **described(job, options, number, run_dir),
        "samples_per_second": table.replicas[0].samples / world.now_s if world.now_s else 0.0,
        "virtual_s": world.now_s, "compute": str(compute), "network": str(network),
        "num_events": world.num_events, "wall_s": time.monotonic() - started_s,
        "injected": [row for straggler in stragglers for row in straggler.counts()],
        "loss_curve": log.curve,
        "ranks": [returned[rank] | {"drift": table.replicas[rank].averager.drift} for rank in range(number)],
    }  # fmt: skip
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
            LocalReplica(job, options.lr, own, strategy, table, rank, reader.batch, num_samples)
            for rank, own in enumerate(modules_of(module, number))
        ]
    )
    if job.validate is not None:
        validation = job.validate.reader(job.validate.scan(), job.seed)
        table.measure = make_measure(job, module, validation, torch.device("cpu"))
    workers = []
    for rank, replica in enumerate(table.replicas):
        shares = Shares(num_samples, job.epochs, job.batch_size, number, rank, options.steps, job.drop_last)
        workers.append(LocalWorker(rank, number, shares, replica, NullReport() if rank else log))
    return workers, table


def _result(
    job: Job, options: Overrides, table: Table, shares: Shares, metrics: dict[str, float]
) -> dict[str, Any]:
    """What the run has come to, as the run over MPI tells it."""
    first = table.replicas[0]
    found = {
        **judged(job, metrics),
        **first.averager.statistics(),
        "samples": first.samples,
        "steps": shares.step,
        "samples_left_out": shares.num_left_out,
        "nonfinite": first.nonfinite,
        "accepted": shares.step * table.number - first.nonfinite,
    }
    if first.failure:
        found |= {"failure": first.failure, "status": "fail", "exit_code": 1}
    return found
