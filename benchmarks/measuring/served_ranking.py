"""Whole runs of `mpitrain.train` of the model in `ranking.py`, its table on parameter servers."""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from functools import partial
from typing import Any

import torch
from torch import nn

import mpitrain as mt
from measuring.ranking import WIDTH, WORDS, Ranking, zipf
from mpitrain.values import parse


def served(rows: int, hidden: int) -> nn.Module:
    """The model with a table that only servers hold."""
    return Ranking(mt.ServedEmbedding(rows, WIDTH, mode="sum"), hidden)


def loss_of(rows: int, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of ids by Zipf's law."""
    words = zipf(batch["u"].double() / 2**30, rows)
    return nn.functional.binary_cross_entropy_with_logits(model(words), batch["y"].float())


class Trained:
    """Runs of two workers under a strategy; `result` is what the last one returned."""

    def __init__(self, runtime: Any, rows: int, batch: int, hidden: int, text: str):
        self.runtime, self.batch, self.strategy = runtime, batch, parse(text, "strategy")
        self.job = mt.Job(
            model=partial(served, rows, hidden),
            loss=partial(loss_of, rows),
            optimizer=partial(torch.optim.SGD, lr=0.01),
            data=mt.Synthetic(1 << 20, u=((WORDS,), "int64", 1 << 30), y=((1,), "int64", 2)),
            batch_size=batch,
        )
        self.result: dict[str, Any] = {}

    def run(self, num_steps: int) -> float:
        """The samples a second of a run of so many steps, start and end left out."""
        folder = self.runtime.broadcast(tempfile.mkdtemp() if self.runtime.rank == 0 else None)
        with contextlib.redirect_stdout(io.StringIO()):
            self.result = mt.train(self.job, self.strategy, steps=num_steps, run_dir=folder, quiet=True)
        self.runtime.barrier()
        if self.runtime.rank == 0:
            shutil.rmtree(folder)
        return float(self.result["samples_per_second"])
