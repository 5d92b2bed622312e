"""Peers in virtual time: the very role of the cluster, one process, any number of them.

Law of this file: it composes like `training/peers.py`, with the virtual world in place of MPI. All virtual peers share
one module, each with its own parameters, optimizer and buffers.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

from mpitrain.errors import EXIT_OK, EXIT_TARGET_MISSED, UsageError
from mpitrain.inject import Straggler, check_workers
from mpitrain.job import Job, Overrides
from mpitrain.model.flat import FlatModel
from mpitrain.model.peering import PeerReplica
from mpitrain.report import NullReport, Report, default_run_dir
from mpitrain.roles.peer import Peer
from mpitrain.rules import Decentralized
from mpitrain.rules.shares import Shares
from mpitrain.training.measure import MODEL_FILE, build, build_optimizer, make_measure, save_model
from mpitrain.training.peers import summary
from mpitrain.virtual import ComputeLaw, NetworkLaw, VirtualWorld
from mpitrain.virtual_log import VirtualLog


def simulate_peers(
    job: Job, options: Overrides, number: int, compute: ComputeLaw, network: NetworkLaw
) -> dict[str, Any]:
    """Rehearse a decentralised job with `number` peers; returns what `result.json` holds.

    Raises:
        UsageError: a wrong option, or more peers than samples.
    """
    rule = job.strategy
    assert isinstance(rule, Decentralized)
    if number < 1:
        raise UsageError(f"--workers must be at least 1, got {number}")
    check_workers(options.injections, number)
    catalogue = job.data.scan()
    if catalogue.num_samples < number:
        raise UsageError(f"{number} peers for {catalogue.num_samples} training samples: use at most as many")
    run_dir = Path(options.run_dir or default_run_dir(f"{job.name or 'job'}-virtual")).resolve()
    planned = catalogue.num_samples * job.epochs
    if options.steps is not None:
        planned = options.steps * number * job.batch_size
    report = Report(run_dir, planned, quiet=options.quiet, num_epochs=job.epochs)
    world = VirtualWorld(compute, network, job.seed)
    log = VirtualLog(report, world, math.ceil(planned / (job.batch_size * number)), options.quiet)
    stragglers = [Straggler(options.injections, index, job.seed) for index in range(number)]
    module, optimizer = build(job, options.lr, torch.device("cpu"))
    model = FlatModel(module, optimizer, 1)
    started_s = time.monotonic()
    with job.data.reader(catalogue, job.seed) as reader:
        measure = None
        if job.validate is not None:
            validation = job.validate.reader(job.validate.scan(), job.seed)
            measure = make_measure(job, module, validation, torch.device("cpu"))
        replicas = _replicas(job, options, number, model, reader, catalogue.num_samples, measure)
        peers = [
            Peer(
                rank, number, rule, _shares(job, options, catalogue.num_samples, number, rank), replica,
                log if rank == 0 else NullReport(), job.on_nonfinite,
            )
            for rank, replica in enumerate(replicas)
        ]  # fmt: skip
        returned = world.run({rank: stragglers[rank].wrap(peer.run()) for rank, peer in enumerate(peers)})
        save_model(replicas[0].take_module(), run_dir / MODEL_FILE, {"strategy": str(rule)})
        metrics = replicas[0].validate()
    everybody = [returned[rank] | replicas[rank].statistics(with_norm=True) for rank in range(number)]
    result = {
        **summary(everybody, [one["digest"] for one in everybody], everybody[0], peers[0].shares),
        **judged(job, metrics),
        **described(job, options, number, run_dir),
        "samples": peers[0].shares.samples,
        "samples_per_second": peers[0].shares.samples / world.now_s if world.now_s else 0.0,
        "steps": peers[0].shares.step,
        "virtual_s": world.now_s, "compute": str(compute), "network": str(network),
        "num_events": world.num_events, "wall_s": time.monotonic() - started_s,
        "injected": [row for straggler in stragglers for row in straggler.counts()],
        "loss_curve": log.curve, "ranks": everybody,
    }  # fmt: skip
    log.finish(result)
    return result


def _replicas(
    job: Job, options: Overrides, number: int, model: FlatModel, reader: Any, num_samples: int, measure: Any
) -> list[PeerReplica]:
    rule = job.strategy
    assert isinstance(rule, Decentralized)
    return [
        PeerReplica(
            model, build_optimizer(job, model.module, options.lr), rule, number, rank, job.loss, reader.batch,
            _no_prefetch, job.seed, measure if rank == 0 else None, True, job.schedule, num_samples,
        )
        for rank in range(number)
    ]  # fmt: skip


def _shares(job: Job, options: Overrides, num_samples: int, number: int, rank: int) -> Shares:
    rule = job.strategy
    assert isinstance(rule, Decentralized)
    return Shares(
        num_samples, job.epochs, job.batch_size, number, rank, options.steps, job.drop_last, rule.warmup
    )


def described(job: Job, options: Overrides, number: int, run_dir: Path) -> dict[str, Any]:
    """What was asked for."""
    return {
        "strategy": str(job.strategy), "strategy_python": repr(job.strategy), "workers": number, "servers": 0,
        "nodes": 1, "virtual": True, "inject": [str(one) for one in options.injections],
        "run_dir": str(run_dir), "model": str(run_dir / MODEL_FILE), "seed": job.seed,
        "batch_size": job.batch_size,
    }  # fmt: skip


def judged(job: Job, metrics: dict[str, float]) -> dict[str, Any]:
    """The metrics, and whether they reach the job's target."""
    missed = {name: goal for name, goal in job.target.items() if not metrics.get(name, float("-inf")) >= goal}
    failure = ", ".join(f"{name} {metrics.get(name)} is below {goal}" for name, goal in missed.items())
    return {
        **metrics,
        "metrics": metrics,
        "failure": failure,
        "status": "fail" if failure else "ok",
        "exit_code": EXIT_TARGET_MISSED if failure else EXIT_OK,
    }


def _no_prefetch(epoch: int, start: int, count: int) -> None:
    """Virtual time waits for no disk."""
