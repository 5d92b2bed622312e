"""Processes of a rank that make batches ahead.

Invariants: a process makes what it is given, in that order, and sends it through shared memory; it holds no lock and no
connection of the rank's but its own, ignores the signals that ask a job to end (the rank obeys them), collects no
garbage of the rank's (what a device knows of, such as pinned memory, must not be given back there), and ends with the
rank, however that ends. An error of the dataset arrives where its batch is asked for; a process that dies is named.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from multiprocessing import connection
from multiprocessing.context import BaseContext
from typing import Any

import torch
import torch.multiprocessing

from mpitrain.data.datasets.collate import describe
from mpitrain.data.read.batch import Batch
from mpitrain.errors import DataError, MpitrainError, UsageError
from mpitrain.torch_versions import be_loader_worker

ALIVE_S = 1.0  # how often a process looks whether its rank still lives
END_S = 5.0  # to end by itself
IGNORED = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")


class LoaderWorkers:
    """Processes that call `load(*job)`; `options` are a `LoaderOptions`. For one thread."""

    def __init__(self, load: Callable[..., Batch], options: Any):
        self._options = options
        self._connections: list[Any] = []
        self._processes: list[Any] = []
        self._waiting: list[dict[Hashable, int]] = [{} for _ in range(options.num_workers)]  # in order
        self._done: dict[Hashable, tuple[bool, Any]] = {}
        self._unwanted: set[tuple[int, int]] = set()  # (process, number of the job)
        self._numbers = itertools.count()
        context = _context(options.multiprocessing_context)
        seed = torch.initial_seed() & 0x7FFFFFFF
        try:
            for number in range(options.num_workers):
                here, there = context.Pipe()
                process = context.Process(
                    target=work,
                    args=(
                        load,
                        there,
                        number,
                        options.num_workers,
                        options.worker_init_fn,
                        seed,
                        os.getpid(),
                    ),
                    name=f"mpitrain-loader-{number}",
                    daemon=True,
                )
                try:
                    with _uncollected():
                        process.start()
                except Exception as error:  # pickle's own, a TypeError or an AttributeError
                    raise UsageError(
                        f"num_workers={options.num_workers}: the dataset or a function of its loader cannot be sent to "
                        f"a process that is started with {context.get_start_method()!r} ({error}); define it at the "
                        "top of a module, or use multiprocessing_context='fork', or num_workers=0"
                    ) from error
                there.close()
                self._connections.append(here)
                self._processes.append(process)
        except BaseException:
            _end(self._connections, self._processes)
            raise
        self._finalize = weakref.finalize(self, _end, self._connections, self._processes)

    def submit(self, key: Hashable, job: tuple[object, ...]) -> None:
        """Have the process with the least to do make this one after what it has."""
        worker = min(range(len(self._processes)), key=lambda one: len(self._waiting[one]))
        number = next(self._numbers)
        self._waiting[worker][key] = number
        with self._naming_the_dead(worker):
            self._connections[worker].send((number, job))

    def forget(self, key: Hashable) -> None:
        """Nobody will ask for it."""
        if self._done.pop(key, None) is None:
            for worker, waiting in enumerate(self._waiting):
                if key in waiting:
                    self._unwanted.add((worker, waiting.pop(key)))

    def result(self, key: Hashable) -> Batch:
        """What was made for `key`, waiting for it.

        Raises:
            DataError: the dataset has raised, or the process died, or it takes longer than `timeout`.
        """
        deadline = time.monotonic() + self._options.timeout if self._options.timeout else float("inf")
        while key not in self._done:
            worker = next(one for one, waiting in enumerate(self._waiting) if key in waiting)
            self._receive(worker, deadline)
        succeeded, value = self._done.pop(key)
        if not succeeded:
            raise DataError(value)
        batch: Batch = value
        return batch

    def _receive(self, worker: int, deadline: float) -> None:
        """One more result of this process."""
        process = self._processes[worker]
        left_s = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        ready = connection.wait([self._connections[worker], process.sentinel], left_s)
        if not ready:
            raise DataError(
                f"process {worker} of the loader has made no batch for {self._options.timeout:g} s, which is its "
                "timeout; raise it, or look for what the dataset waits for"
            )
        with self._naming_the_dead(worker):
            if self._connections[worker] not in ready:
                raise EOFError
            number, succeeded, value = self._connections[worker].recv()
        if (worker, number) in self._unwanted:
            self._unwanted.remove((worker, number))
            return
        key = next(key for key, other in self._waiting[worker].items() if other == number)
        del self._waiting[worker][key]
        self._done[key] = succeeded, value

    @contextlib.contextmanager
    def _naming_the_dead(self, worker: int) -> Any:
        try:
            yield
        except (EOFError, OSError) as error:
            process = self._processes[worker]
            process.join(END_S)
            code = process.exitcode
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            raise DataError(
                f"process {worker} of the loader has ended with {how}; a signal 9 is often the system's, for want of "
                "memory: use fewer num_workers, or a smaller prefetch_factor"
            ) from error

    def close(self) -> None:
        """End the processes; may be called twice."""
        self._finalize()


def _context(wanted: Any) -> Any:
    """How processes start: as asked for, else with fork, as torch's loaders do."""
    if isinstance(wanted, BaseContext):
        return wanted
    methods = torch.multiprocessing.get_all_start_methods()
    return torch.multiprocessing.get_context(wanted or ("fork" if "fork" in methods else None))


def _end(connections: list[Any], processes: list[Any]) -> None:
    for one in connections:
        with contextlib.suppress(OSError):
            one.send(None)
    deadline = time.monotonic() + END_S
    for process, one in zip(processes, connections):
        if process._parent_pid == os.getpid():  # not in a process that was forked from the rank
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        one.close()
    connections.clear()
    processes.clear()


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Python's collector rests: in a process that is started meanwhile it does so until `work` begins."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def work(
    load: Callable[..., Batch],
    jobs: Any,
    number: int,
    num_workers: int,
    worker_init_fn: Callable[[int], None] | None,
    seed: int,
    rank_pid: int,
) -> None:
    """What a process does, until it is told to end or its rank is gone."""
    gc.freeze()
    gc.enable()
    for name in IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    torch.set_num_threads(1)
    dataset: Any = getattr(getattr(load, "load", load), "dataset", None)
    be_loader_worker({"id": number, "num_workers": num_workers, "seed": seed + number, "dataset": dataset})
    failed = ""
    try:
        if worker_init_fn is not None:
            worker_init_fn(number)
    except Exception as error:
        failed = f"worker_init_fn({number}) has failed: {describe(error)}"
    while True:
        while not jobs.poll(ALIVE_S):
            if os.getppid() != rank_pid:
                os._exit(0)
        try:
            job = jobs.recv()
            if job is None:
                return
            jobs.send((job[0], *_outcome(load, job[1], failed)))
        except (EOFError, OSError):
            os._exit(0)


def _outcome(load: Callable[..., Batch], job: tuple[object, ...], failed: str) -> tuple[bool, Any]:
    if failed:
        return False, failed
    try:
        return True, load(*job)
    except MpitrainError as error:
        return False, str(error)
    except Exception as error:
        return False, describe(error)
