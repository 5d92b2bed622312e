"""Checkpoints of peers: every peer writes a part of its own, after the same step.

Invariants: as many peers as wrote go on bit for bit where they are synchronous. Any other number goes on from
the mean of the parameters; optimizer states and buffers are dealt out in turn, and what codecs had kept back is added
up, so that the mean over peers of what is still to be sent stays what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mpitrain.checkpoint import Checkpoint, CheckpointWriter
from mpitrain.errors import CheckpointError
from mpitrain.model.replicas.peer_replica import PeerReplica
from mpitrain.model.wire.codec_registry import merge_states
from mpitrain.roles.peer import Peer
from mpitrain.roles.peer_checkpoints import PeerCheckpoints
from mpitrain.strategies.checkpoint_policy import Cadence, CheckpointPolicy
from mpitrain.strategies.decentralized import Decentralized
from mpitrain.strategies.part_names import own_part
from mpitrain.training import signals
from mpitrain.training.resuming.resume import make_checkpoint_writer, read_own_part, restoring
from mpitrain.training.resuming.resume_options import same_codec
from mpitrain.training.schedule import go_on, report_end_of
from mpitrain.training.session import Session
from mpitrain.values import parse


def make_checkpoints(
    session: Session, strategy: Decentralized, about: dict[str, Any], state: Callable[[], dict[str, Any]]
) -> tuple[PeerCheckpoints, CheckpointWriter]:
    """When this peer writes `state` beside that of its role, and who writes; where peers do not meet, only at the end,
    at which they do: a signal then ends the run as it is."""
    runtime = session.runtime
    writer = make_checkpoint_writer(session, own_part(runtime.rank), about, state)
    if strategy.never_meets:
        signals.end_at_once()
    policy = CheckpointPolicy() if strategy.never_meets else writer.plan.policy
    parts = [own_part(rank) for rank in range(runtime.size)] if runtime.rank == 0 else []
    samples = session.resume.checkpoint_at if session.resume else 0
    cadence = Cadence(policy, samples)
    return PeerCheckpoints(writer, parts, cadence, strategy.asynchronous, samples), writer


def begin(session: Session, peer: Peer, replica: PeerReplica) -> None:
    """Go on from a checkpoint, if there is one, with what a schedule counts from, and refuse a state that none can
    hold."""
    with restoring(session.resume):
        if (part := restore(session.resume, peer, replica)) is not None:
            go_on(session, replica.updates.pace, part, peer.partition.samples)
            peer.validations.go_on_from(part.get("figures"))
    report_end_of(session, replica.updates.pace)
    if peer.checkpoints is not None:
        peer.checkpoints.try_out(peer.state)


def restore(resume: Checkpoint | None, peer: Peer, replica: PeerReplica) -> dict[str, Any] | None:
    """This peer's state, or what falls to it of another number's; returns the part that it has read."""
    if resume is None:
        return None
    number = len(resume.parts)
    mine: dict[str, Any] = read_own_part(resume, own_part(peer.rank % number))
    peer.restore(mine["role"])
    strategy = peer.strategy
    assert isinstance(strategy, Decentralized)
    before = parse(resume.about["strategy"], "strategy")
    if not isinstance(before, Decentralized):
        raise CheckpointError(f"{resume.folder} says that it is of {before}, and holds parts of peers")
    # copies that peers mixing parameters keep of each other belong to one codec and one way of waiting
    mixed_alike = not strategy.mixes or (before.codec, before.asynchronous) == (
        strategy.codec,
        strategy.asynchronous,
    )
    same = number == peer.number and mixed_alike
    state = mine["replica"] if same else _of_others(resume, peer, number, mine)
    if not same_codec(resume.about, strategy, "codec"):
        state = {**state, "encoder": {}}
    replica.restore(state)
    return mine


def _of_others(resume: Checkpoint, peer: Peer, number: int, mine: dict[str, Any]) -> dict[str, Any]:
    mean, encoders = torch.zeros_like(mine["replica"]["parameters"]), []
    for rank in range(number):
        part = mine if rank == peer.rank % number else read_own_part(resume, own_part(rank))
        mean.add_(part["replica"]["parameters"])
        encoders.append(part["replica"]["encoder"])
    first = encoders[0]
    kept = [] if peer.strategy.mixes else encoders[peer.rank :: peer.number]
    mean.div_(number)
    return {
        "parameters": mean,
        "common": mean,
        "copies": {},
        "optimizer": mine["replica"]["optimizer"],
        "buffers": mine["replica"]["buffers"],
        "ema": mine["replica"].get("ema"),
        "encoder": merge_states(first, kept, peer.number / number) if first else {},
    }
