"""A job's step function that waits in its middle: wherever it steps an optimizer, whoever runs it has the gradient
used elsewhere, and lets it go on.

Invariants: the function runs in a thread of its own and only while somebody waits for it, so nothing in this process
computes beside it. What it has left on the parameters, and the random numbers it goes on with, are its own: others may
use the same module meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mpitrain.devices import accelerator, draws
from mpitrain.system import background


class _BrokenOffError(BaseException):
    """Raised in a function that is not to go on."""


class SuspendedStep:
    """One call.

    Args:
        call: the whole of it; it calls `wait` where it wants to be suspended.
        module: whose gradients it leaves behind.
    """

    def __init__(self, call: Callable[[], Any], module: nn.Module):
        self._call, self._module = call, module
        self._to_function: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._from_function: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._kept: tuple[list[torch.Tensor | None], draws.RandomStates] | None = None
        self._thread: threading.Thread | None = None
        self._num_threads, self._device = torch.get_num_threads(), next(module.parameters()).device

    def advance(self) -> tuple[str, Any]:
        """Let it go on; returns ("waits", what it has said) or, at its end, ("ends", what it has returned).

        Raises:
            BaseException: what it raises.
        """
        if self._kept is not None:
            gradients, random = self._kept
            for parameter, gradient in zip(self._module.parameters(), gradients, strict=True):
                parameter.grad = gradient
            random.restore()
        if self._thread is None:
            self._thread = background.start("step", self._run)
        else:
            self._to_function.put(True)
        how, what = self._from_function.get()
        while how == "asks":
            what()
            self._to_function.put(True)
            how, what = self._from_function.get()
        if how != "waits":
            self._thread.join()
        if how == "raises":
            raise what
        if how == "waits":
            states = draws.RandomStates([self._device])
            self._kept = [one.grad for one in self._module.parameters()], states
        return how, what

    def wait(self, said: Any) -> None:
        """Called by the function: until somebody lets it go on."""
        self._stand("waits", said)

    def ask(self, task: Callable[[], object]) -> None:
        """Called by the function: has whoever waits for it do this, which holds the locks of this process."""
        self._stand("asks", task)

    def _stand(self, how: str, what: Any) -> None:
        self._from_function.put((how, what))
        if not self._to_function.get():
            raise _BrokenOffError

    def break_off(self) -> None:
        """It does not go on."""
        if self._thread is not None and self._thread.is_alive():
            self._to_function.put(False)
            self._thread.join()

    def _run(self) -> None:
        try:
            torch.set_num_threads(self._num_threads)  # which is a thread's own
            accelerator.make_current(self._device)
            self._from_function.put(("ends", self._call()))
        except _BrokenOffError:
            pass
        except BaseException as error:
            self._from_function.put(("raises", error))
