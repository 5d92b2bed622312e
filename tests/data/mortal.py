"""Dying at a chosen moment, and several ranks in one process: what tests of packing share."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mpitrain.system.files.atomic import Sink


def die_at(moment: int, work: Callable[[], object]) -> bool:
    """Run `work` in a forked child that dies like by SIGKILL before its `moment`-th change of the disk; whether it
    did."""
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9), "the child failed by itself"
        return code == 9
    left = [moment]

    def mortal(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os._exit(9)
            return function(*arguments, **options)

        return call

    try:
        for owner, name in ((os, "replace"), (os, "unlink"), (Path, "unlink"), (Sink, "write")):
            setattr(owner, name, mortal(getattr(owner, name)))
        work()
        os._exit(0)
    finally:
        os._exit(1)


class Threads:
    """Ranks as threads of this process: each has its own `rank`, and they meet at a barrier."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[Any]):
        self.rank, self.size, self._barrier, self._board = rank, size, barrier, board

    def allgather(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait()
        told = list(self._board)
        self._barrier.wait()
        return told

    def broadcast(self, value: Any) -> Any:
        return self.allgather(value)[0]

    def agree(self, error: Exception | None) -> None:
        for told in self.allgather(error):
            if told is not None:
                raise told


def on_ranks(size: int, work: Callable[[Threads], Any]) -> list[Any]:
    """What `work(ranks)` returns on each of `size` ranks; the first exception is raised here, like a job's end."""
    barrier, board = threading.Barrier(size, timeout=60), [None] * size
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(Threads(rank, size, barrier, board))
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@pytest.fixture(autouse=True, scope="module")
def no_power_cut() -> Iterator[None]:
    """fsync costs most of the time here, and nothing that these tests do would show its absence."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield
