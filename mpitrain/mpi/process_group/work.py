"""What a collective returns at once: torch's Work, on an Op of the engine.

Two traps of torch make this file. Its own wrapper of a future as a Work loses errors (`wait()` returns True) and
refuses a timeout, so the Work is ours. And `Future.set_exception` only stores the exception as the *value*: DDP, which
reads the future in C++, takes it for a tensor and crashes. Only a callback that raises makes a future that has failed
for C++ too, so the exception goes through one.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future

from mpitrain.devices.accelerator import is_on_device
from mpitrain.mpi.engine.engine import Engine
from mpitrain.mpi.operation import Op
from mpitrain.mpi.process_group import profiled
from mpitrain.system import trace

_NO_TIMEOUT = timedelta(0)  # what torch passes when the user gives none
_GRACE_S = 2.0
_listening = threading.Lock()
_callbacks = ThreadPoolExecutor(max_workers=64, thread_name_prefix="mpitrain-callback")  # grows as they block


class MpiWork(Work):
    """A collective or transfer under way; `settle` is to be the callback of its Op.

    `result` is what the future holds when all went well; `timeout` is the group's; `span` ends with it; `tell` is
    called with what went wrong, before anybody who waits gets it.
    """

    def __init__(
        self, engine: Engine, what: str, result: Any, timeout: timedelta, span: object = None,
        tell: Callable[[BaseException], None] | None = None,
    ):  # fmt: skip
        super().__init__()
        self._span, self._tell = span, tell
        self._engine, self._what, self._result, self._timeout = engine, what, result, timeout
        self._error: BaseException | None = None
        self._done = False
        self._listeners: list[Callable[[], None]] = []
        self._future: Future[Any] | None = None
        self.source = -1

    @classmethod
    def of_all(cls, engine: Engine, works: Sequence["MpiWork"], timeout: timedelta) -> "MpiWork":
        """A Work that is done when all `works` are, with the first error among them."""
        whole = cls(engine, "coalesced operations", [], timeout)
        if not works:
            whole.end(None)
            return whole
        left = len(works)

        def one_done() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                whole.end(next((work._error for work in works if work._error is not None), None))

        for work in works:
            work._listen(one_done)
        return whole

    def settle(self, op: Op, finish: Callable[[], None] = lambda: None) -> None:
        """In the thread that owns MPI: `op` is done; `finish` brings its results home."""
        error = op.error
        if error is None:
            try:
                finish()
            except Exception as failure:
                error = failure
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """Complete, with or without an error, which every caller that waits gets."""
        self._error = error
        if error is not None and self._tell is not None:
            self._tell(error)
        span, self._span = self._span, None
        profiled.end(span)
        with _listening:
            self._done = True
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()

    def _listen(self, listener: Callable[[], None]) -> None:
        """Have `listener()` called once when this is done, at once if it is."""
        with _listening:
            if not self._done:
                self._listeners.append(listener)
                return
        listener()

    def _outcome(self, _: "Future[None]") -> Any:
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """True when done; raises what went wrong, or TimeoutError after `timeout` (or else the group's)."""
        if not self._done and not (profiled.is_on() or trace.is_on()):
            self._wait(timeout)
        elif not self._done:
            with profiled.waiting(), trace.span(f"wait: {self._what}", trace.WAIT):
                self._wait(timeout)
        if self._error is not None:
            raise self._error
        return True

    def _wait(self, timeout: timedelta) -> None:
        own = timeout == _NO_TIMEOUT  # the engine itself lets the operation fail; this is for when it cannot
        limit_s = self._timeout.total_seconds() + _GRACE_S if own else timeout.total_seconds()
        try:
            self._engine.wait_any(self.is_completed, limit_s)
        except TimeoutError:
            raise TimeoutError(
                f"{self._what} timed out after {limit_s:g} s: not all ranks have called it"
            ) from None

    def get_future(self) -> "Future[Any]":
        """The future that DDP and `then` chains use; made on demand."""
        if self._future is None and self._done and self._error is None:
            self._future = Future(devices=_devices(self._result))
            self._future.set_result(self._result)
        elif self._future is None:
            ended: Future[None] = Future(
                devices=_devices(self._result)
            )  # torch refuses to put other devices' tensors in
            self._future = ended.then(self._outcome)
            if self._done:  # no callback was added to it yet
                ended.set_result(None)
            else:
                by_autograd = _is_asked_by_autograd()
                self._listen(lambda: ended.set_result(None) if by_autograd else _hand_over(ended))
        return self._future

    def is_completed(self) -> bool:
        """True when done, well or not."""
        return self._done

    def is_success(self) -> bool:
        """True when done and well."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """What went wrong, if anything has."""
        return self._error

    def _source_rank(self) -> int:
        """Who sent what a receive from any source has got; -1 before it is done."""
        return self.source

    def source_rank(self) -> int:
        """The same."""
        return self.source

    def synchronize(self) -> None:
        """Nothing to do: when a Work is done, its results are where they belong, on the device too."""

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result."""
        return self._result if isinstance(self._result, list) else [self._result]


def _is_asked_by_autograd() -> bool:
    """Whether the caller's caller is C++ that a backward pass has called, as DDP's is: what it leaves in a future is
    C++, too, and waits for nothing."""
    try:
        frame = sys._getframe(2)
    except ValueError:  # no Python at all
        return True
    return str(frame.f_globals.get("__name__")).startswith("torch.autograd.")


def _hand_over(ended: "Future[None]") -> None:
    """Complete a future, and so run what `then` left there, in a thread of its own: torch's PowerSGD hook waits for
    further collectives in its callbacks, which the thread that drives MPI could never answer."""
    try:
        _callbacks.submit(ended.set_result, None)
    except RuntimeError:  # the interpreter is shutting down
        ended.set_result(None)


def _devices(result: Any) -> list[int | str | torch.device] | None:
    """The devices that hold a result (a tensor, or lists of them); None if there are none."""
    tensors: list[Any] = [result]
    found: set[torch.device] = set()
    while tensors:
        item = tensors.pop()
        if isinstance(item, list | tuple):
            tensors += item
        elif is_on_device(item):
            found.add(item.device)
    return [*sorted(found, key=str)] or None
