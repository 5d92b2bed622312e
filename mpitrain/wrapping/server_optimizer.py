"""The optimizer that a wrapped loop holds in place of its own: `step()` hands gradients in and brings parameters back.

Invariants: it is a worker role turned inside out: where the role asks for a gradient, the user's loop runs.
"""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from mpitrain.errors import NonFiniteError, UsageError
from mpitrain.roles import SaveRequest, Worker
from mpitrain.strategies.base import ServerStrategy
from mpitrain.wrapping.delegating import DelegatingOptimizer

if TYPE_CHECKING:
    from mpitrain.model import Replica
    from mpitrain.mpi.runtime import Runtime
    from mpitrain.mpi.world import MpiWorld


class ServerOptimizer(DelegatingOptimizer):
    """An optimizer whose state lives on the servers: `step()` pushes gradients, with the options of the groups where
    they have changed, and brings back parameters.
    """

    def __init__(
        self,
        runtime: Runtime,
        optimizer: Optimizer,
        strategy: ServerStrategy,
        replica: Replica,
        worker: Worker,
        world: MpiWorld,
    ):
        super().__init__(optimizer, str(strategy))
        self.roles = worker.roles
        self._runtime, self._replica = runtime, replica
        self._worker, self._world = worker, world
        self._role = worker.run()
        self._active = False

    def start(self) -> None:
        """Join the servers and take over their parameters."""
        self._active = self._world.advance(self._role, None) is not None
        self._replica.model.in_place.begin_interval()
        atexit.register(self._leave)

    def step(self, closure: object = None) -> Any:
        """Push the gradients, wait for the answer; the model then holds the servers' parameters. Returns
        the closure's loss.

        Raises:
            NonFiniteError: the gradient holds a NaN or an infinity; it was not applied and the run is
                over.
            UsageError: a step hook or the loop itself changes parameters, or an option was changed that cannot travel.
        """
        if not self._active:
            raise UsageError(
                "step() after finish(): this worker has left the servers; call finish() after the last step"
            )
        self._runtime.stamp()  # between two pushes, too
        self._replica.model.in_place.end_interval()
        steps = self._replica.server_steps
        if steps is not None:
            steps.hooks.before(closure)
        loss = _evaluate(closure)
        gradient = self._replica.collect(float(loss) if loss is not None else 0.0, 1)
        self._go_on(gradient)
        if steps is not None:
            steps.hooks.after(closure)
        self._replica.model.in_place.begin_interval()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """That of a worker's own optimizer.

        Raises:
            UsageError: it lives on the servers.
        """
        if self._replica.server_steps is not None:
            raise UsageError(
                f"state_dict(): under {self.strategy} the optimizer's state is on the servers; mpitrain.save writes "
                "it, and mpitrain.wrap(..., resume=...) brings it back"
            )
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into a worker's own optimizer.

        Raises:
            UsageError: it lives on the servers.
        """
        if self._replica.server_steps is not None:
            raise UsageError(
                f"load_state_dict(): under {self.strategy} the optimizer's state is on the servers; load it before "
                "mpitrain.wrap, which takes it along, or resume what mpitrain.save wrote"
            )
        with self._replica.model.stepping():
            super().load_state_dict(state_dict)

    def _go_on(self, answer: object) -> None:
        """Hand the role what it has asked for; returns when it asks again."""
        self._active = self._world.advance(self._role, answer) is not None
        if not self._active:
            raise NonFiniteError(
                f"{self._runtime.where()}: training stopped: this gradient or another worker's is not finite"
            )

    def save(self, order: SaveRequest) -> dict[str, Any]:
        """Have the servers write their parts of a checkpoint, and return what belongs in this worker's."""
        if not self._active:
            raise UsageError("save() after finish(): this worker has left the servers; save before finish()")
        self._replica.model.in_place.end_interval()
        self._go_on(order)
        self._replica.model.in_place.begin_interval()  # the servers have answered
        return {
            "role": self._worker.state(),
            "replica": self._replica.state(),
        }

    def finish(self) -> None:
        """Push no more; wait for the others and take the final parameters."""
        self._worker.wants_final = True
        self._leave()

    def _leave(self) -> None:
        if self._active:
            self._active = False
            self._world.advance(self._role, None)
            self._runtime.evicted |= self._runtime.dead()  # the end is not to wait for them


def _evaluate(closure: Any) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
