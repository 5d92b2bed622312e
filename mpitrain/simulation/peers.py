"""Peers in virtual time: the very role of the cluster, one process, any number of them.

Invariants: it composes like `training/decentralized/run.py`, with the virtual world in place of MPI. All virtual
peers share one module, each with its own parameters, optimizer and buffers.
"""

from __future__ import annotations

from typing import Any

import torch

from mpitrain.job import Job, Overrides
from mpitrain.model.flat import FlatModel
from mpitrain.model.peer_replica import PeerReplica
from mpitrain.reporting.report import NullReport
from mpitrain.roles.peer import Peer
from mpitrain.simulation.base import Rehearsal
from mpitrain.strategies.decentralized import Decentralized
from mpitrain.strategies.sampling.peer_partition import Shares
from mpitrain.training.decentralized.run import summary
from mpitrain.training.measure import MODEL_FILE, build, build_optimizer, make_measure, save_model
from mpitrain.virtual import ComputeLaw, NetworkLaw


def simulate_peers(
    job: Job, options: Overrides, number: int, compute: ComputeLaw, network: NetworkLaw
) -> dict[str, Any]:
    """Rehearse a decentralised job with `number` peers; returns what `result.json` holds.

    Raises:
        UsageError: a wrong option, or more peers than samples.
    """
    rule = job.strategy
    assert isinstance(rule, Decentralized)
    rehearsal = Rehearsal(job, options, number, compute, network)
    num_samples, log = rehearsal.catalogue.num_samples, rehearsal.log
    module, optimizer = build(job, options.lr, torch.device("cpu"))
    model = FlatModel(module, optimizer, 1)
    with job.data.reader(rehearsal.catalogue, job.seed) as reader:
        measure = None
        if job.validate is not None:
            validation = job.validate.reader(job.validate.scan(), job.seed)
            measure = make_measure(job, module, validation, torch.device("cpu"))
        replicas = _replicas(job, options, number, model, reader, num_samples, measure)
        peers = [
            Peer(
                rank, number, rule, _shares(job, options, num_samples, number, rank), replica,
                log if rank == 0 else NullReport(), job.on_nonfinite,
            )
            for rank, replica in enumerate(replicas)
        ]  # fmt: skip
        returned = rehearsal.run([peer.run() for peer in peers])
        save_model(replicas[0].take_module(), rehearsal.run_dir / MODEL_FILE, {"strategy": str(rule)})
        metrics = replicas[0].validate()
    everybody = [one | replica.statistics(with_norm=True) for one, replica in zip(returned, replicas)]
    result = {
        **summary(everybody, [one["digest"] for one in everybody], everybody[0], peers[0].shares),
        **rehearsal.told(peers[0].shares.samples, metrics),
        "steps": peers[0].shares.step,
        "ranks": everybody,
    }
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


def _no_prefetch(epoch: int, start: int, count: int) -> None:
    """Virtual time waits for no disk."""
