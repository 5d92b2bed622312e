"""One rank of `growth.py`: trains, and writes down what it has cost up to each stage.

Invariants: the counts begin before torch is imported. Files are counted by Python's own audit events, so what the
loader of shared libraries opens is not among them. Bytes and messages are those of JSON between ranks, of server and
worker messages and of arrivals at collectives; gradients that are reduced in a blocking call of MPI are not among them.
"""

from __future__ import annotations

import sys
import threading
import time

BEGAN_S = time.time()
COUNTS = dict.fromkeys(("opens", "listings", "bytes", "messages", "fsyncs"), 0)
WRITING: dict[
    int, dict[str, int]
] = {}  # threads that write a part of a checkpoint, and what they have counted


def count(name: str, number: int = 1) -> None:
    COUNTS[name] += number
    if (own := WRITING.get(threading.get_ident())) is not None:
        own[name] += number


def on_event(event: str, arguments: tuple) -> None:
    if event == "open":
        count("opens")
    elif event in ("os.listdir", "os.scandir"):
        count("listings")


sys.addaudithook(on_event)
STAGES: list[dict] = []


def stage(name: str) -> None:
    """What this rank has cost by now."""
    STAGES.append({"stage": name, "cpu_s": time.process_time(), "time_s": time.time(), **COUNTS})


stage("python")
import torch  # noqa: E402, F401

stage("torch")

import json  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import mpitrain.checkpoint.background_writer as background_writer  # noqa: E402
import mpitrain.training.session as session  # noqa: E402
from mpitrain.job import Overrides  # noqa: E402
from mpitrain.training import train_command  # noqa: E402

stage("package")
from mpitrain.mpi import json_collectives, runtime  # noqa: E402
from mpitrain.mpi.engine.requests import Progress  # noqa: E402

stage("MPI")


class CountingComm:
    """A communicator whose collectives are counted."""

    def __init__(self, comm: Any):
        self.comm = comm

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.comm, name)
        if not callable(found):
            return found

        def call(*buffers: Any, **options: Any) -> Any:
            count("messages")
            count("bytes", sum(map(num_bytes, buffers)))
            return found(*buffers, **options)

        return call


def num_bytes(buffer: Any) -> int:
    """Of what mpi4py takes as a message."""
    if isinstance(buffer, list | tuple):
        return num_bytes(buffer[0])
    try:
        return memoryview(buffer).nbytes
    except TypeError:
        return 0


def count_collectives() -> None:
    for name in ("broadcast", "gather", "gather_bytes", "allgather", "largest"):
        counted = getattr(json_collectives, name)

        def call(comm: Any, *values: Any, counted: Any = counted) -> Any:
            return counted(CountingComm(comm), *values)

        setattr(json_collectives, name, call)
    complete = Progress.complete

    def completed(self: Any, op: Any, error: Any = None) -> None:
        if op.kind in ("send", "receive", "arrival") and error is None:
            count("messages")
            count("bytes", op.status_bytes if op.kind == "receive" else num_bytes(op.buffer))
        complete(self, op, error)

    Progress.complete = completed  # type: ignore[method-assign]


PARTS: list[dict] = []


def count_checkpoints() -> None:
    write_part, fsync = background_writer.write_part, os.fsync

    def counted(*arguments: Any, **options: Any) -> int:
        own = WRITING[threading.get_ident()] = dict.fromkeys(COUNTS, 0)
        began_s = time.thread_time()
        try:
            written = write_part(*arguments, **options)
            own["bytes"] = written
            PARTS.append({"cpu_s": time.thread_time() - began_s, **own})
            return written
        finally:
            del WRITING[threading.get_ident()]

    def synced(descriptor: Any) -> None:
        count("fsyncs")
        fsync(descriptor)

    background_writer.write_part, os.fsync = counted, synced  # type: ignore[assignment]


def watch_stages() -> None:
    begin, finish, step = session.begin, session.Session.finish, runtime.Runtime.step

    def begun(rt: Any) -> None:
        begin(rt)
        stage("agreed")

    def finished(self: Any, outcome: Any) -> Any:
        stage("trained")
        result = finish(self, outcome)
        stage("judged")
        return result

    def set_step(self: Any, number: int) -> None:
        assert step.fset is not None
        if number > self.step:
            stage(f"step {number}")
        step.fset(self, number)

    session.begin, session.Session.finish = begun, finished  # type: ignore[assignment]
    runtime.Runtime.step = step.setter(set_step)  # type: ignore[misc]


def main() -> None:
    folder, job, words = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    count_collectives()
    count_checkpoints()
    watch_stages()
    connected = runtime.start()
    stage("connected")
    rank, size = connected.rank, connected.size
    code = train_command(job, Overrides(**words))
    stage("ended")
    row = {"rank": rank, "size": size, "role": connected.role, "stages": STAGES, "parts": PARTS, "code": code}
    (folder / f"rank-{rank}.json").write_text(json.dumps(row))


if __name__ == "__main__":
    main()
