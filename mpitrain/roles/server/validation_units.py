"""A validation that all workers compute: what the dealing server knows of it, and deals.

Invariants: every claim is answered, so no worker waits for more than a server's turn; what a claim brings of a
validation that is over is dropped. A unit is given out once. Whether it comes back is the validating worker's concern
(`roles/divided_validation.py`): the server judges nobody by it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from typing import Any

from mpitrain.effects import Effect, Send
from mpitrain.messages import Assist, Claim, Divide, Measured, Message, Over, Unit

Steps = Generator[Effect, Any, None]
OF_VALIDATIONS = (Divide, Claim, Over)


class ValidationUnits:
    """The validation under way, if there is one.

    Args:
        helpers: the workers that may be asked for help now.
    """

    def __init__(self, helpers: Callable[[], Collection[int]]):
        self.helpers = helpers
        self.validator: int | None = None
        self.number = self._next_unit = self._num_units = 0
        self._snapshot: Any = None  # a payload
        self._informed: set[int] = set()  # who has been sent what is measured

    def take_message(self, worker: int, message: Message) -> Steps:
        """A message of a validation."""
        if isinstance(message, Divide):
            yield from self._begin(worker, message)
        elif isinstance(message, Claim):
            yield from self._on_claim(worker, message)
        elif isinstance(message, Over) and worker == self.validator:
            self.end()

    def end(self) -> None:
        """It is over, or nobody is there to conclude it."""
        if self._snapshot is not None:
            self._snapshot.release()
        self.validator, self._snapshot = None, None

    def lose(self, worker: int) -> None:
        """`worker` is lost."""
        if worker == self.validator:
            self.end()

    def _begin(self, worker: int, message: Divide) -> Steps:
        self.end()
        self.validator, self.number = worker, self.number + 1
        self._next_unit, self._num_units = 0, message.num_units
        self._snapshot, self._informed = message.payload, {worker}
        for helper in sorted(self.helpers()):
            if helper != worker:
                yield Send(helper, Assist())

    def _on_claim(self, worker: int, message: Claim) -> Steps:
        if message.payload is not None:
            if self.validator is not None and message.number == self.number:
                yield Send(self.validator, Measured(message.number, message.unit, message.payload))
            else:
                message.payload.release()
        if self.validator is None or self._next_unit >= self._num_units:
            yield Send(worker, Unit(self.number, -1))
            return
        unit, self._next_unit = self._next_unit, self._next_unit + 1
        payload = None
        if worker not in self._informed and self._snapshot is not None:
            self._informed.add(worker)
            payload = self._snapshot.hold()
        yield Send(worker, Unit(self.number, unit, payload))
