"""The job `jobs/digits.py` as a loop of one's own in plain torch, which every library of `sweeps.py` is given as its
trial, and what a trial notes down of its time.

Invariants: a trial begins where the library calls it, and is over with its last report, for libraries end the process
or the thread of one that they stop. Each process has a file of its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


def model() -> nn.Module:
    """As in the job file; `sweeps.py` compares them."""
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, kernel_size=3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 4 * 4, 10),
    )  # fmt: skip


def trial(told: dict[str, Any], seed: int, lr: float, batch_size: int) -> Iterator[float]:
    """Train all epochs, and yield the validation accuracy after each."""
    torch.set_num_threads(1)
    _note(told, began_s=time.time())
    arrays = np.load(told["arrays"])
    x, y, held_x, held_y = (torch.from_numpy(arrays[name]) for name in ("x", "y", "held_x", "held_y"))
    torch.manual_seed(seed)
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    for _ in range(told["epochs"]):
        for part in torch.randperm(len(y)).split(batch_size):
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(net(x[part]), y[part]).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = float((net(held_x).argmax(dim=1) == held_y).float().mean())
        _note(told, at_s=time.time(), samples=len(y), accuracy=accuracy)
        yield accuracy


def _note(told: dict[str, Any], **event: float) -> None:
    with open(Path(told["folder"]) / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as events:
        events.write(json.dumps(event) + "\n")


def noted(folder: Path) -> tuple[list[dict[str, Any]], list[tuple[float, float]]]:
    """All reports in the order in which they came, and when each trial began and was over; the files are gone then."""
    reports, spans = [], []
    for path in folder.glob("*.jsonl"):
        for event in map(json.loads, path.read_text().splitlines()):
            if "began_s" in event:
                spans.append((event["began_s"], event["began_s"]))
            else:
                reports.append(event)
                spans[-1] = (spans[-1][0], event["at_s"])
        path.unlink()
    return sorted(reports, key=lambda one: one["at_s"]), spans


def account(folder: Path, num_workers: int) -> dict[str, Any]:
    """What a sweep answers: its reports, and the share of the time from its first trial to its last report that its
    workers had none."""
    reports, spans = noted(folder)
    elapsed_s = max(end for _, end in spans) - min(begin for begin, _ in spans)
    busy_s = sum(end - begin for begin, end in spans)
    return {
        "reports": [[one["samples"], one["accuracy"]] for one in reports],
        "elapsed_s": elapsed_s,
        "idle_share": 1 - busy_s / (num_workers * elapsed_s),
    }
