"""What the workers of every library of `low_communication.py` do: the same model, batches and steps, and how they are
timed.

Invariants: a turn is one period: its last step averages, and every step's clock starts where the one before it stopped.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from measuring.models import MODELS
from torch import nn

BATCH, NUM_BATCHES = 32, 16
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}  # of DiLoCo, as its authors chose it


class Worker:
    """A model of its own, the same on every rank, and batches that differ."""

    def __init__(self, model: str, rank: int):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        make, shape = MODELS[model]
        self.module, self.num_steps = make(), 0
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)
        draw = torch.Generator().manual_seed(1 + rank)
        self.x = torch.randn(NUM_BATCHES, BATCH, *shape, generator=draw)
        self.y = torch.randint(10, (NUM_BATCHES, BATCH), generator=draw)

    def turn(self, period: int, after: Callable[[], Any] = lambda: None) -> dict[str, float]:
        """One period; `after` follows every step. Seconds of a step, and what the last one took more than others."""
        seconds, began_s = [], time.perf_counter()
        for _ in range(period):
            at = self.num_steps % NUM_BATCHES
            self.optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(self.module(self.x[at]), self.y[at]).backward()
            self.optimizer.step()
            self.num_steps += 1
            after()
            ended_s = time.perf_counter()
            seconds.append(ended_s - began_s)
            began_s = ended_s
        return {
            "step_s": statistics.mean(seconds),
            "averaging_s": seconds[-1] - statistics.median(seconds[:-1]),
        }

    def save(self, path: str) -> None:
        """Write the parameters, one after the other."""
        np.save(path, nn.utils.parameters_to_vector(self.module.parameters()).detach().numpy())


class Meeting:
    """Where the processes of a library wait for each other, before the clock starts."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = torch.distributed.TCPStore(address, port, self.size, self.rank == 0)
        self._number = 0

    def meet(self) -> None:
        """Return when all have come here."""
        self._number += 1
        if self.store.add(f"come {self._number}", 1) == self.size:
            self.store.set(f"go {self._number}", "")
        self.store.wait([f"go {self._number}"])

    def told(self, text: str | None) -> str:
        """The first process's text."""
        if text is not None:
            self.store.set("told", text)
        return str(self.store.get("told").decode())


def answer_for(
    worker: Worker, meeting: Meeting, after: Callable[[], Any] = lambda: None
) -> Callable[..., Any]:
    """Answers of a process: a turn, or where it has written its parameters."""

    def answer(period: int = 0, path: str = "") -> Any:
        if path:
            return worker.save(path) if meeting.rank == 0 else None
        meeting.meet()
        return worker.turn(period, after)

    return answer
