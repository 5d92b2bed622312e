"""Emergency checkpoints of a run over parameter servers.

Invariants: a server's state is whole while it waits for a message, and is then as of its last update: what has
been gathered since for the next one is left out, together with the counts of it, and is computed again. The dealing
server does nothing until all shards have written, so no worker gets further than the pushes it has in flight, and each
other shard writes when it is within these. Under a strategy that gathers gradients all shards make the same updates;
they write the same update or nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from mpitrain.checkpoint import CheckpointWriter
from mpitrain.effects import Compute, Effect, Recv, Role, watched
from mpitrain.errors import CheckpointError
from mpitrain.roles import FaultTolerantServer, Server, Worker
from mpitrain.training.parameter_server.builder import AnyStore
from mpitrain.training.session import Session
from mpitrain.training.watchdog.alarm_files import EmergencyCheckpoint
from mpitrain.training.watchdog.emergency import Emergency, Guard, KeptBuffers, Taken


def with_whole_state(role: Role, guard: Guard, look: Callable[[], None]) -> Role:
    """The role, with its state guarded: it is whole while the role waits for a message. `look` is called just before
    that."""

    def before(effect: Effect) -> None:
        if isinstance(effect, Recv):
            look()
            guard.end()

    def after(effect: Effect, answer: object) -> None:
        if isinstance(effect, Recv):
            guard.begin()

    return watched(role, before, after)


class StateAtLastUpdate:
    """A server's state as of its last update. Where pushes wait for those of others it is copied after every update,
    and otherwise only on demand."""

    def __init__(self, server: Server):
        self.server = server
        self.gathers = False
        self._kept: tuple[int, int, dict[str, Any]] | None = None

    def look(self) -> None:
        """The server is about to wait."""
        if not self.server.gathering.empty:
            self.gathers = True
        elif self.gathers and (self._kept is None or self._kept[1] != self.server.counts.version):
            self._kept = self._now()

    def take(self) -> tuple[int, int, dict[str, Any]]:
        """Accepted samples, version, and the role's state.

        Raises:
            CheckpointError: there was no update yet from which to keep counts.
        """
        if self.server.gathering.empty:
            return self._now()
        if self._kept is None:
            raise CheckpointError("no update has been made since the start")
        return self._kept

    def _now(self) -> tuple[int, int, dict[str, Any]]:
        counts = self.server.counts
        return counts.samples_accepted, counts.version, self.server.state()


def shard_writer(
    session: Session,
    server: FaultTolerantServer,
    store: AnyStore,
    writer: CheckpointWriter,
    module: nn.Module,
) -> tuple[Emergency | None, str, Role]:
    """What would write this shard's part, or why nothing can; and the server's role, to be run in place of its own."""
    strategy, workers = server.strategy, server.workers
    if session.overrides.watchdog_s <= 0:
        return None, "there is no watchdog", server.run()
    is_coded = not (strategy.push_codec.is_none and strategy.reply_codec.is_none)
    if strategy.optimizer == "worker" or strategy.reduces or is_coded:
        return None, f"{strategy}: the state that workers keep belongs to no common update", server.run()
    last_update, guard = StateAtLastUpdate(server), Guard()
    has_buffers = next(module.buffers(), None) is not None

    def take() -> Taken:
        if store.follows_options:
            raise CheckpointError(
                "hooks have changed the optimizer's options, and how they go on only workers know"
            )
        samples, version, role = last_update.take()
        return Taken(samples, version, {"role": role, "store": store.state()})

    def parts() -> list[str]:
        shards = [f"shard-{shard}" for shard in range(strategy.servers)]
        return shards + [f"worker-{workers.index(server.validator)}"] * has_buffers

    in_flight = len(workers) * strategy.inflight * strategy.push_every * session.job.step_samples

    def fits(checkpoint: EmergencyCheckpoint, taken: Taken) -> bool:
        if last_update.gathers:
            return (checkpoint.checkpoint_at, checkpoint.step) == (taken.samples, taken.step)
        return abs(checkpoint.checkpoint_at - taken.samples) <= in_flight

    emergency = Emergency(writer, guard, take, parts, fits)
    return emergency, "", with_whole_state(server.run(), guard, last_update.look)


def worker_writer(
    writer: CheckpointWriter, worker: Worker, module: nn.Module, on: bool
) -> tuple[Emergency | None, Role]:
    """What this worker would write, should it be the validator: buffers as they were before its present batch."""
    kept, guard = KeptBuffers(module, on), Guard()
    if not kept.names:
        return None, worker.run()

    def take() -> Taken:
        replica = {"buffers": kept.copies(), "local": None, "coder": None}
        return Taken(worker.samples, worker.step, {"role": worker.state(), "replica": replica})

    return Emergency(writer, guard, take, fits=lambda cut, taken: True), _keeping(worker.run(), guard, kept)


def _keeping(role: Role, guard: Guard, kept: KeptBuffers) -> Role:
    def before(effect: Effect) -> None:
        if isinstance(effect, Compute) and effect.what == "gradient":
            guard.begin()
            kept.keep_present()
            guard.end()

    return watched(role, before)
