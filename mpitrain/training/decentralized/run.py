"""A run without a server: builds this rank's peer and lets the MPI world run it.

Invariants: this file only composes. Every rank is a peer; the first one logs, validates and saves the model, which is
the mean of all, taken at the last meeting.
"""

from __future__ import annotations

from typing import Any

import torch

from mpitrain.messages import Kind
from mpitrain.model import peer_model
from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.model.replicas.peer_replica import PeerReplica
from mpitrain.model.wire.buffers import VariableBuffer
from mpitrain.model.wire.flat import FlatModel
from mpitrain.roles.peer import Peer
from mpitrain.strategies.decentralized import Decentralized
from mpitrain.strategies.features import MPI
from mpitrain.strategies.sampling.peer_partition import Endless, PeerPartition
from mpitrain.system.launched.ranks import Ranks
from mpitrain.system.sizes import size_text
from mpitrain.training.decentralized.builder import Fetch, PeerBuilder
from mpitrain.training.decentralized.checkpoints import begin, make_checkpoints
from mpitrain.training.measure import (
    Meter,
    compute_thread,
    num_warmup,
    share_module,
)
from mpitrain.training.outcome import RunOutcome
from mpitrain.training.recipe import recipe_of
from mpitrain.training.resuming.initial_weights import build_on_ranks
from mpitrain.training.resuming.resume import about_run, check
from mpitrain.training.resuming.resume_options import describe_optimizer
from mpitrain.training.schedule import goes_by_figures
from mpitrain.training.session import Session, attempt
from mpitrain.training.trained.deliver import save_final
from mpitrain.training.validations.measured_elsewhere import MeasuredByPeers
from mpitrain.training.validations.validation import make_measure


def cost(strategy: Decentralized, num_peers: int, model: FlatModel) -> dict[str, Any]:
    """What each peer sends a step once all take part."""
    sends = strategy.messages_to_workers(num_peers)
    sent_bytes = sends * model.layout.size(0) * model.layout.wire_dtype.itemsize
    coded = {} if strategy.codec.is_none else {"before": str(strategy.codec)}
    return {"per": "step and rank", "messages": sends, "sent": size_text(sent_bytes), **coded}


def run_peers(session: Session) -> RunOutcome:
    """Train as one of the peers; returns what this rank knows of the run."""
    runtime, job, strategy = session.runtime, session.job, session.strategy
    assert isinstance(strategy, Decentralized)
    device = session.device
    module, optimizer = build_on_ranks(session, device, session.overrides.lr)
    share_module(runtime, module)
    model = attempt(runtime, lambda: peer_model(module, optimizer, strategy, MPI))
    shapes = [f"{n} {s}" for n, s in zip(model.layout.names, model.layout.shapes, strict=True)]
    runtime.compare({"parameters": shapes, "dtype": f"{model.layout.dtype} as {model.layout.wire_dtype}"})
    about = about_run(session, shapes, strategy.family, describe_optimizer(module, optimizer))
    attempt(runtime, lambda: check(session, about))
    first = runtime.rank == 0
    with job.data.reader(session.catalogue, job.seed) as reader:
        rule = recipe_of(job, strategy, runtime.size, session.catalogue.num_samples).update
        informs = attempt(runtime, lambda: goes_by_figures(job, rule, Rates(optimizer), strategy))
        validations = session.validations(informs=informs)
        measure = make_measure(job, module, session.validation, device, runtime.stamp, validations)
        num_samples = session.catalogue.num_samples
        builder = PeerBuilder(strategy, runtime.size, job, num_samples, session.overrides.steps)
        fetch = _stamped(runtime, reader)
        replica = attempt(
            runtime, lambda: builder.replica(runtime.rank, model, optimizer, fetch, reader.prefetch)
        )
        measures = MeasuredByPeers(replica, measure, runtime.size) if measure else None
        num_steps = session.total_samples() // (job.step_samples * runtime.size)
        meter = Meter(session.report, num_warmup(num_steps))
        session.in_emergency(
            None, f"{strategy}: a peer sends its update to the others in the middle of its step"
        )
        session.report.event("exchange", **cost(strategy, runtime.size, model))
        checkpoints, writer = make_checkpoints(
            session, strategy, about,
            lambda: {"replica": replica.state(), **replica.updates.pace.state(peer.partition.samples)},
        )  # fmt: skip
        peer = builder.peer(runtime.rank, replica, meter, checkpoints, validations, measures)
        attempt(runtime, lambda: begin(session, peer, replica))
        meter.go_on_from(peer.partition.samples, peer.partition.step)
        counts, injected = _run(session, strategy, peer, replica, device)
    writer.wait()
    digests = runtime.allgather(counts["digest"])
    detail = {
        "role": "worker", **counts, **replica.statistics(with_norm=True), "checkpoints": writer.summary(),
    }  # fmt: skip
    outcome = RunOutcome(detail, "", checkpoints.ended, writer.unwritten, injected)
    everybody = runtime.allgather(
        {
            key: counts[key]
            for key in ("batches", "drift", "drift_max", "max_steps_ahead", "nonfinite", "sent_bytes")
        }
    )
    saved = save_final(session, replica) if first else {}
    samples = None if outcome.requeue else peer.partition.samples
    metrics = measures.measure_together(runtime, samples) if measures is not None else {}
    if first:
        outcome.result = {
            **meter.result(), **summary(everybody, digests, counts, peer.partition), **saved, "metrics": metrics,
            **validations.result(),
        }  # fmt: skip
    return outcome


def _stamped(runtime: Ranks, reader: Any) -> Fetch:
    def fetch(epoch: int, start: int, count: int) -> Any:
        runtime.stamp()  # a peer that is alone sends nothing, and still makes progress
        return reader.batch(epoch, start, count)

    return fetch


def _run(
    session: Session, strategy: Decentralized, peer: Peer, replica: PeerReplica, device: torch.device
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    runtime, straggler = session.runtime, session.straggler()

    def on_step(step: int) -> None:
        runtime.step = step

    def buffer_for(source: int, kind: Kind) -> Any:
        if kind in (Kind.DIVIDE, Kind.MEASURED):
            return VariableBuffer()
        return replica.buffer_for(kind == Kind.UPDATE)

    computer = compute_thread(device) if strategy.asynchronous else None
    contacts = strategy.contacts(runtime.rank, runtime.size)
    world = runtime.make_world(contacts, buffer_for, on_step=on_step, computer=computer)
    return world.run(straggler.wrap(peer.run())), straggler.counts()


def summary(
    everybody: list[dict[str, Any]],
    digests: list[str],
    first: dict[str, Any],
    partition: PeerPartition | Endless,
) -> dict[str, Any]:
    """What `result.json` says of all peers together, from what each has counted."""
    steps = max(1, first["steps"])
    return {
        "accepted": sum(one["batches"] - one["nonfinite"] for one in everybody),
        "nonfinite": sum(one["nonfinite"] for one in everybody),
        "samples_left_out": partition.num_left_out,
        "drift": max(one["drift"] for one in everybody),
        "drift_max": max(one["drift_max"] for one in everybody),
        "replicas_identical": len(set(digests)) == 1,
        "max_steps_ahead": max(one["max_steps_ahead"] for one in everybody),
        "averagings": first["averagings"],
        "sent_bytes_per_step": sum(one["sent_bytes"] for one in everybody) / len(everybody) / steps,
    }
