"""The optimizer that a wrapped loop holds among peers: the user's own, which also exchanges with the other peers.

Invariants: it is the peer role turned inside out: where the role asks for a gradient, the user's loop runs.
Peers take equally many steps, as DDP demands too.
"""

from __future__ import annotations

import atexit
import functools
import os
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from mpitrain.effects import Role
from mpitrain.errors import UsageError
from mpitrain.messages import Kind
from mpitrain.model import peer_model
from mpitrain.model.optimizers.optimizer import check_closure
from mpitrain.model.replicas.peer_replica import PeerReplica
from mpitrain.mpi.world import MpiWorld
from mpitrain.reporting.report import NullReport
from mpitrain.strategies.decentralized import Decentralized
from mpitrain.strategies.features import LOOP
from mpitrain.strategies.part_names import own_part
from mpitrain.training.decentralized.builder import PeerBuilder
from mpitrain.training.measure import share_module
from mpitrain.training.session import attempt
from mpitrain.wrapping.checkpoints import Resumed, Saver, about_loop, find_run, lockstep_saver, loop_state
from mpitrain.wrapping.delegating import DelegatingOptimizer

if TYPE_CHECKING:
    from mpitrain.mpi.runtime import Runtime


class PeerOptimizer(DelegatingOptimizer):
    """The user's optimizer, with its groups and state; `step()` also exchanges with the other peers."""

    def __init__(
        self, optimizer: Optimizer, strategy: str, replica: PeerReplica, role: Role, world: MpiWorld
    ):
        super().__init__(optimizer, strategy)
        self._replica, self._role, self._world = replica, role, world
        self._num_steps = 0
        self._active = False

    def start(self) -> None:
        """Run the role up to its first gradient; from here on the other peers may wait for this one."""
        self._active = self._world.advance(self._role, None) is not None
        self._replica.model.in_place.begin_interval()
        atexit.register(self.finish)

    def step(self, closure: Any = None) -> Any:
        """One step of this peer: it sends its update to the others, and the parameters take in what the others have
        sent. Returns the closure's loss.

        Raises:
            NonFiniteError: the gradient holds a NaN or an infinity.
            UsageError: after `finish`; or the loop changes parameters, which the other peers would not learn of.
        """
        loss = closure() if closure is not None else None
        if not self._active:
            raise UsageError(
                "step() after finish(): this peer has left the others; call finish() after the last step"
            )
        self._replica.model.in_place.end_interval()
        self._num_steps += 1
        self._world.on_step(self._num_steps)  # a peer that is alone sends nothing, and still makes progress
        gradient = self._replica.collect(float(loss) if loss is not None else 0.0, 1)
        self._active = self._world.advance(self._role, gradient) is not None
        self._replica.show()
        self._replica.model.in_place.begin_interval()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the user's optimizer's."""
        with self._replica.model.stepping():
            super().load_state_dict(state_dict)

    def finish(self) -> None:
        """Meet all peers; the model is then the mean of all."""
        if self._active:
            self._active = False
            self._world.advance(self._role, None)
            self._replica.show()


def join_peers(
    runtime: Runtime,
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Decentralized,
    resume: str | os.PathLike[str] | None,
) -> tuple[PeerOptimizer, Saver, Resumed | None]:
    """Make this rank a peer around the user's own loop.

    Raises:
        UsageError (AgreedError under MPI): a warm-up, which only `train` can count; an optimizer or dtype that does
        not fit the codec; a checkpoint of another run or number of peers.
    """
    runtime.role = "peer"
    runtime.compare(
        {"strategy": str(strategy), "parameters": [str(tuple(p.shape)) for p in model.parameters()]}
    )
    about, part = about_loop(strategy, model, runtime.size), own_part(runtime.rank)
    run = find_run(runtime, resume, about, same_number=True)
    found = run.found
    share_module(runtime, model)
    builder = PeerBuilder(strategy, runtime.size)
    replica = attempt(runtime, lambda: _replica(builder, runtime.rank, model, optimizer))
    peer = builder.peer(runtime.rank, replica, NullReport())
    saved = found.part(part) if found else None
    if saved is not None:
        peer.restore(saved["role"])
        replica.restore(saved["replica"])

    def take() -> dict[str, Any]:
        if strategy.asynchronous:
            raise UsageError(
                f"{strategy}: peers that do not wait for one another have no common step to save"
            )
        # the role has begun the step that the loop is to compute next
        return {
            "role": peer.state() | {"partition": {"step": peer.partition.step - 1}},
            "replica": replica.state(),
        }

    contacts = strategy.contacts(runtime.rank, runtime.size)
    world = MpiWorld(
        runtime.engine,
        contacts,
        lambda source, kind: replica.buffer_for(kind == Kind.UPDATE),
        functools.partial(setattr, runtime, "step"),
    )
    saver = lockstep_saver(run, about, runtime.rank, runtime.size, take)
    wrapped = PeerOptimizer(optimizer, str(strategy), replica, peer.run(), world)
    wrapped.start()
    return wrapped, saver, loop_state(found, saved)


def _replica(builder: PeerBuilder, rank: int, model: nn.Module, optimizer: Optimizer) -> PeerReplica:
    strategy = builder.strategy
    if strategy.warmup.epochs:
        raise UsageError(f"{strategy}: a warm-up is counted in epochs, which only `train` knows, not `wrap`")
    check_closure(optimizer, str(strategy))
    return builder.replica(rank, peer_model(model, optimizer, strategy, LOOP), optimizer)
