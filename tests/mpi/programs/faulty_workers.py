"""A run on servers, some of whose workers come to harm. Argument: JSON of `path`, `strategy`, `epochs`, `width` and
`faults`: rank -> [how, at which of its batches or payloads, seconds after that payload was posted or None].

What a rank does to itself at a batch is ordered by `inject`, where that knows it. Two things it does not: stopping a
whole process for a second, and killing one from another thread in the middle of a message.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mpitrain as mt
from mpitrain.mpi.messenger import PAYLOAD_TAG
from mpitrain.mpi.operation import Op
from mpitrain.mpi.runtime import start
from mpitrain.strategies.base import ServerStrategy
from mpitrain.values import parse
from tests import toy

asked: dict[str, Any] = json.loads(sys.argv[1])
path, width = Path(asked["path"]), asked["width"]
faults: dict[int, tuple[str, int, float | None]] = {
    int(rank): tuple(f) for rank, f in asked["faults"].items()
}
runtime, strategy = start(), parse(asked["strategy"], "strategy")
assert isinstance(strategy, ServerStrategy)
# where nobody waits for anybody, a victim that is slow to start would find all samples taken
waits = strategy.name in ("async", "softsync")
how, at, delay_s = faults.get(runtime.rank, ("", 0, None))
batches: list[int] = []
payloads: list[int] = []
post = runtime.engine.isend


def pause() -> None:
    stopped = os.getpid()
    if os.fork() == 0:
        time.sleep(asked["pause_s"])
        os.kill(stopped, signal.SIGCONT)
        os._exit(0)
    os.kill(stopped, signal.SIGSTOP)


def kill() -> None:
    (path / f"hurt-{runtime.rank}").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    batches.append(1)
    time.sleep(0.002)
    if len(batches) == at and delay_s is None:
        (path / f"hurt-{runtime.rank}").touch()
        if how == "pause":
            pause()
    if waits and len(batches) == 4 and runtime.rank not in faults:
        while not all((path / f"hurt-{rank}").exists() for rank in faults):
            time.sleep(0.01)
    return toy.square_loss(model, batch)


def aimed(buffer: Any, rank: int, tag: int, *rest: Any) -> Op:
    """The kill comes from another thread, a moment after the payload has been posted: in the middle of the message."""
    op: Op = post(buffer, rank, tag, *rest)
    if tag == PAYLOAD_TAG and delay_s is not None:
        payloads.append(1)
        if len(payloads) == at:
            threading.Timer(delay_s, kill).start()
    return op


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05 / width)


runtime.engine.isend = aimed
job = toy.make_job(
    model=lambda: toy.wide(width),
    loss=loss,
    optimizer=sgd,
    epochs=asked["epochs"],
    batch_size=4,
    validate=toy.Memory(),
    checkpoint_every="never",
)
inject = [
    f"{kind}(worker={rank - strategy.servers},at_step={step - 1})"
    for rank, (kind, step, delay) in faults.items()
    if delay is None and kind != "pause"
]
heartbeat_s = asked["heartbeat_s"]
result = mt.train(job, strategy, run_dir=str(path), quiet=True, inject=inject, heartbeat_s=heartbeat_s)
runtime.exit_code = result["exit_code"]
