"""What a collective returns at once: torch's Work, on an Op of the engine.

Two traps of torch 2.13 make this file. Its own wrapper of a future as a Work loses errors (`wait()` returns True) and
refuses a timeout, so the Work is ours. And `Future.set_exception` only stores the exception as the *value*: DDP, which
reads the future in C++, takes it for a tensor and crashes. Only a callback that raises makes a future that has failed
for C++ too, so the exception goes through one.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from mpitrain.mpi.engine import Engine
from mpitrain.mpi.op import Op

_NO_TIMEOUT = timedelta(0)  # what torch passes when the user says nothing


class MpiWork(Work):
    """A collective or transfer under way; `settle` is to be the callback of its Op.

    `result` is what the future holds when all went well; `timeout` is the group's.
    """

    def __init__(self, engine: Engine, what: str, result: Any, timeout: timedelta):
        super().__init__()
        self._engine, self._what, self._result, self._timeout = engine, what, result, timeout
        self._error: BaseException | None = None
        self.source = -1
        self._ended: Future[None] = Future(
            devices=_devices(result)
        )  # torch refuses to put other devices' tensors in
        self._future: Future[Any] = self._ended.then(self._outcome)

    @classmethod
    def of_all(cls, engine: Engine, works: Sequence["MpiWork"], timeout: timedelta) -> "MpiWork":
        """A Work that is done when all `works` are, with the first error among them."""
        whole = cls(engine, "coalesced operations", [], timeout)
        if not works:
            whole.end(None)
            return whole
        left = len(works)

        def one_done(_: "Future[Any]") -> None:
            nonlocal left
            left -= 1
            if left == 0:
                whole.end(next((work._error for work in works if work._error is not None), None))

        for work in works:
            work._ended.add_done_callback(one_done)
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
        """Complete, well or with an error that everybody who waits gets."""
        self._error = error
        self._ended.set_result(None)

    def _outcome(self, _: "Future[None]") -> Any:
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """True when done; raises what went wrong, or TimeoutError after `timeout` (or else the group's)."""
        limit = self._timeout if timeout == _NO_TIMEOUT else timeout
        try:
            self._engine.wait_any(self._future.done, limit.total_seconds())
        except TimeoutError:
            raise TimeoutError(
                f"{self._what} is not done after {limit}: not all ranks have called it"
            ) from None
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> "Future[Any]":
        """The future that DDP and `then` chains use."""
        return self._future

    def is_completed(self) -> bool:
        """True when done, well or not."""
        return self._future.done()

    def is_success(self) -> bool:
        """True when done and well."""
        return self._future.done() and self._error is None

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


def _devices(result: Any) -> list[int | str | torch.device] | None:
    """The GPUs that hold a result (a tensor, or lists of them); None if there are none."""
    tensors: list[Any] = [result]
    found: set[torch.device] = set()
    while tensors:
        item = tensors.pop()
        if isinstance(item, list | tuple):
            tensors += item
        elif item.is_cuda:
            found.add(item.device)
    return [*sorted(found, key=str)] or None
