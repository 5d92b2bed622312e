"""The optimizer that a wrapped loop holds in place of its own: `step()` hands gradients in and brings parameters back.

Law of this file: it is a worker role turned inside out: where the role asks for a gradient, the user's loop runs.
"""

from __future__ import annotations

import atexit
from typing import Any

from torch.optim import Optimizer

from mpitrain.errors import NonFiniteError, UsageError
from mpitrain.roles import Save
from mpitrain.rules import ServerStrategy


class RemoteOptimizer(Optimizer):
    """An optimizer whose state lives on the servers: `step()` pushes gradients and brings back
    parameters.
    """

    def __init__(
        self,
        runtime: Any,
        optimizer: Optimizer,
        strategy: ServerStrategy,
        replica: Any,
        worker: Any,
        world: Any,
    ):
        # the same groups and parameters, so that zero_grad and schedulers find them
        self.__dict__.update(optimizer.__dict__)
        self.roles = worker.roles
        self._runtime, self._strategy, self._replica = runtime, strategy, replica
        self._worker, self._world = worker, world
        self._options = _options(optimizer)
        self._role = worker.run()
        self._active = world.advance(self._role, None) is not None
        atexit.register(self._leave)

    def step(self, closure: Any = None) -> Any:
        """Push the gradients, wait for the answer; the model then holds the servers' parameters. Returns
        the closure's loss.

        Raises:
            NonFiniteError: the gradient holds a NaN or an infinity; it was not applied and the run is
                over.
            UsageError: an option of a parameter group was changed: the servers would not see it.
        """
        loss = closure() if closure is not None else None
        if self._strategy.optimizer == "server" and _options(self) != self._options:
            raise UsageError(
                "a learning rate or other option was changed on a worker; under a server "
                "strategy the servers hold them"
            )
        if not self._active:
            raise UsageError("step() after finish(): this worker has left the servers")
        gradient = self._replica.collect(float(loss) if loss is not None else 0.0, 1)
        self._go_on(gradient)
        return loss

    def _go_on(self, answer: Any) -> None:
        """Hand the role what it has asked for; returns when it asks again."""
        self._active = self._world.advance(self._role, answer) is not None
        if not self._active:
            raise NonFiniteError(
                f"{self._runtime.where()}: training stopped: this gradient or another worker's is not finite"
            )

    def save(self, order: Save) -> dict[str, Any]:
        """Have the servers write their parts of a checkpoint, and return what belongs in this worker's."""
        if not self._active:
            raise UsageError("save() after finish(): this worker has left the servers")
        self._go_on(order)
        return {"role": self._worker.state(), "replica": self._replica.state()}

    def finish(self) -> None:
        """Push no more; wait for the others and take the final parameters."""
        self._worker.wants_final = True
        self._leave()

    def _leave(self) -> None:
        if self._active:
            self._active = False
            self._world.advance(self._role, None)
            self._runtime.given_up |= self._runtime.dead()  # the end is not to wait for them


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
