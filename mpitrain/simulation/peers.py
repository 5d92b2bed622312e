"""Peers in virtual time: the very role of the cluster, one process, any number of them.

Invariants: it composes like `training/decentralized/run.py`, with the virtual world in place of MPI. All virtual
peers share one module, each with its own parameters, optimizer and buffers.
"""

from __future__ import annotations

from typing import Any

from mpitrain.model import peer_model
from mpitrain.reporting.report import NullReport
from mpitrain.simulation.base import VirtualRun
from mpitrain.strategies.decentralized import Decentralized
from mpitrain.strategies.features import VIRTUAL
from mpitrain.training.decentralized.builder import PeerBuilder
from mpitrain.training.decentralized.run import cost, summary
from mpitrain.training.measure import build_optimizer
from mpitrain.training.validations.averaged_model import EMA_MODEL_FILE
from mpitrain.training.validations.measured_elsewhere import MeasuredByPeers


def simulate_peers(virtual: VirtualRun) -> dict[str, Any]:
    """Simulate a decentralised job; returns what `result.json` holds."""
    job, options, number, strategy = virtual.job, virtual.options, virtual.number, virtual.job.strategy
    assert isinstance(strategy, Decentralized)
    builder = PeerBuilder(strategy, number, job, virtual.catalogue.num_samples, options.steps)
    module, optimizer = virtual.build()
    virtual.start_alike()
    log = virtual.log
    model = peer_model(module, optimizer, strategy, VIRTUAL)
    log.event("exchange", **cost(strategy, number, model))
    with job.data.reader(virtual.catalogue, job.seed) as reader:
        measure = virtual.measure(module)
        replicas = [
            builder.replica(
                rank,
                model,
                build_optimizer(job, module, options.lr),
                reader.batch,
                shared=True,
            )
            for rank in range(number)
        ]
        measures = [MeasuredByPeers(replica, measure, number) if measure else None for replica in replicas]
        peers = [
            builder.peer(
                rank,
                replica,
                NullReport() if rank else log,
                virtual.checkpoints.of_peer(
                    rank, number, strategy, virtual.state_bytes, virtual.validations.may_end
                ),
                virtual.cadence(rank),
                measures[rank],
            )
            for rank, replica in enumerate(replicas)
        ]
        returned = virtual.run([peer.run() for peer in peers])
        virtual.save(replicas[0].take_module())
        if (ema := replicas[0].updates.ema) is not None:
            with ema.swapped():
                virtual.save(replicas[0].take_module(), EMA_MODEL_FILE)
            replicas[0].take_module()
        ended = peers[0].checkpoints is not None and peers[0].checkpoints.ended
        samples = None if ended else peers[0].partition.samples
        metrics = measures[0].alone(samples) if measures[0] is not None else {}
    everybody = [one | replica.statistics(with_norm=True) for one, replica in zip(returned, replicas)]
    result = {
        **summary(everybody, [one["digest"] for one in everybody], everybody[0], peers[0].partition),
        **virtual.result(peers[0].partition.samples, metrics),
        "ended_early": ended,
        "steps": peers[0].partition.step,
        "ranks": everybody,
    }
    log.finish(result)
    return result
