"""A role that sleeps while a large message comes in."""

import sys
import time
from pathlib import Path

import torch

from mpitrain.effects import Now, Recv, Send, Sleep
from mpitrain.messages import Join, Push
from mpitrain.model.wire.buffers import FixedBuffer
from mpitrain.mpi.runtime import start
from mpitrain.mpi.world import MpiWorld

runtime, sent = start(), Path(sys.argv[1])
frame = FixedBuffer(2_000_000, torch.float32)


def sleeper():
    yield Recv()
    core_s, began_s, naps = time.process_time(), (yield Now()), 0
    while (
        naps < 4 or not sent.exists() and naps < 400
    ):  # nothing but sleep, until all of it has left the sender
        assert (yield Sleep(0.25)) is None
        naps += 1
    slept_s, core_s = (yield Now()) - began_s, time.process_time() - core_s
    was_sent = sent.exists()
    _, message = yield Recv()
    print(
        "naps", naps, "slept", slept_s, "core", core_s, "sent", was_sent, "bytes", message.payload.num_bytes
    )


def sender():
    yield Send(0, Join(0))
    yield Send(0, Push(0, 1, 1, frame))


if runtime.rank == 0:
    MpiWorld(runtime.engine, (1,), lambda source, kind: frame).run(sleeper())
else:
    MpiWorld(runtime.engine, (0,), lambda source, kind: frame).run(
        sender()
    )  # returns when all of it has left
    sent.touch()
