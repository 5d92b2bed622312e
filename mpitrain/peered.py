"""The optimizer that a wrapped loop holds among peers: the user's own, whose steps the other peers hear of.

Law of this file: it is the peer role turned inside out: where the role asks for a gradient, the user's loop runs.
Peers take equally many steps, as DDP demands too.
"""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from mpitrain.errors import UsageError
from mpitrain.rules import Decentralized

if TYPE_CHECKING:
    from torch import nn


class PeerOptimizer(Optimizer):
    """The user's optimizer, with its groups and state; `step()` also exchanges with the other peers."""

    def __init__(self, optimizer: Optimizer, replica: Any, role: Any, world: Any):
        self.__dict__.update(
            optimizer.__dict__
        )  # the same groups and state: zero_grad and schedulers find them
        self._replica, self._role, self._world = replica, role, world
        self._active = world.advance(role, None) is not None
        atexit.register(self.finish)

    def step(self, closure: Any = None) -> Any:
        """One step of this peer, told to the others; the parameters have then taken in what was heard. Returns the
        closure's loss.

        Raises:
            NonFiniteError: the gradient holds a NaN or an infinity.
            UsageError: after `finish`.
        """
        loss = closure() if closure is not None else None
        if not self._active:
            raise UsageError("step() after finish(): this peer has met the others for the last time")
        gradient = self._replica.collect(float(loss) if loss is not None else 0.0, 1)
        self._active = self._world.advance(self._role, gradient) is not None
        self._replica.show()
        return loss

    def finish(self) -> None:
        """Meet all peers; the model is then the mean of all."""
        if self._active:
            self._active = False
            self._world.advance(self._role, None)
            self._replica.show()


def join_peers(
    runtime: Any, model: nn.Module, optimizer: Optimizer, strategy: Decentralized
) -> PeerOptimizer:
    """Make this rank a peer around the user's own loop.

    Raises:
        UsageError (AgreedError under MPI): a warm-up, which only `train` can count; an optimizer or dtype that does
        not fit the codec.
    """
    from mpitrain.effects import Kind
    from mpitrain.model.flat import FlatModel
    from mpitrain.model.peering import PeerReplica
    from mpitrain.mpi.world import MpiWorld
    from mpitrain.report import NullReport
    from mpitrain.roles.peer import Peer
    from mpitrain.rules.shares import Endless
    from mpitrain.training.measure import share_module
    from mpitrain.training.session import attempt

    def make() -> PeerReplica:
        if strategy.warmup.epochs:
            raise UsageError(
                f"{strategy}: a warm-up is counted in epochs, which only `train` knows, not `wrap`"
            )
        flat = FlatModel(model, optimizer, 1)
        return PeerReplica(
            flat, optimizer, strategy, runtime.size, runtime.rank, _not_ours, _not_ours, _not_ours, 0
        )

    runtime.role = "peer"
    runtime.compare(
        {"strategy": str(strategy), "parameters": [str(tuple(p.shape)) for p in model.parameters()]}
    )
    share_module(runtime, model)
    replica = attempt(runtime, make)

    def on_step(step: int) -> None:
        runtime.step = step

    def frame_for(source: int, kind: Kind) -> Any:
        return replica.frame_for(kind == Kind.UPDATE)

    shares = Endless(runtime.size, runtime.rank)
    peer = Peer(runtime.rank, runtime.size, strategy, shares, replica, NullReport())
    contacts = strategy.contacts(runtime.rank, runtime.size)
    world = MpiWorld(runtime.engine, contacts, frame_for, on_step)
    return PeerOptimizer(optimizer, replica, peer.run(), world)


def _not_ours(*arguments: Any) -> Any:
    raise AssertionError("loop, loss and data are the user's own")
