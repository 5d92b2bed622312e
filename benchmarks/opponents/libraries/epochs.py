"""How every reader is asked for its speed: samples a second of a shuffled epoch, or of what of it fits into a turn.

A reader is a function of the number of the epoch that yields (x, y) of each batch. What it reads, it has written
itself, once, from the same arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring.beside import answer_with, settings


class Given:
    """The samples, and where a library may write them in its own layout."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.told = settings()
        self.folder = Path(self.told["folder"])
        self.batch_size: int = self.told["batch_size"]
        self.how: Any = self.told["how"]
        arrays = Path(self.told["arrays"])
        self.x, self.y = (np.load(arrays / f"{name}.npy", mmap_mode="r") for name in ("x", "y"))
        self.chunk = max(1, min(len(self.y), (1 << 20) // (self.x.shape[1] + 8)))  # samples in a MiB

    def place(self, name: str) -> Path:
        """Where to write, of which the parent exists."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / name

    def windows(self, seed: int, num_chunks: int) -> Iterator[tuple[list[int], np.ndarray]]:
        """Chunks in a shuffled order, so many together, and a permutation of the samples in them."""
        draw, total = np.random.default_rng(seed), len(self.y)
        order = draw.permutation(-(-total // self.chunk)).tolist()
        for first in range(0, len(order), num_chunks):
            chunks = order[first : first + num_chunks]
            yield chunks, draw.permutation(sum(min(self.chunk, total - at * self.chunk) for at in chunks))

    def cut(self, x: Any, y: Any, order: np.ndarray) -> Iterator[tuple[Any, Any]]:
        """Batches of a window, in this order; the last may be short."""
        for first in range(0, len(order), self.batch_size):
            part = order[first : first + self.batch_size]
            yield x[part], y[part]


def answer_epochs(
    given: Given, epoch: Callable[[int], Iterator[tuple[Any, Any]]], num_workers: int = 0
) -> None:
    """Time epochs of a reader. The clock of a loader with workers starts when each of them has given a batch."""

    def answer(seed: int, turn_s: float) -> float:
        batches = iter(epoch(seed))
        total = sum(int(y.sum()) for _, y in islice(batches, num_workers))
        num_samples = 0
        began_s = time.perf_counter()
        for x, y in batches:
            assert len(x) == len(y)
            num_samples, total = num_samples + len(y), total + int(y.sum())
            if time.perf_counter() - began_s > turn_s:
                break
        else:
            assert total == int(given.y.sum()), "an epoch gives every sample once"
        return num_samples / (time.perf_counter() - began_s)

    answer_with(answer)
