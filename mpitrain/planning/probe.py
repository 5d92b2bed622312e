"""What a job's steps weigh and take on this host: bytes of memory without a clock, and seconds by one.

Invariants: it reads the job's own batches and computes its own loss; nothing is trained that anybody keeps. Seconds
are medians of several steps, within a budget.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mpitrain.data.format.catalogue import Catalogue
from mpitrain.data.read.reader import Reader
from mpitrain.job import Job
from mpitrain.model.loss import read_loss
from mpitrain.training.measure import build, pick_device

LEAST_STEPS = 3
_COPIED = 1 << 22  # float32 numbers


@dataclasses.dataclass(frozen=True)
class Weights:
    """Bytes that a rank holds, and those that travel.

    Attributes:
        parameters: all of them; gradients: of those that are trained; optimizer: its state after a step; None: it
            takes no step with gradients of zero; activations: what the backward pass keeps of a batch.
        sample: of one in the data; None where samples differ in length.
        numbers: trained parameters; flops: of a batch, forward and backward; 0: not counted.
    """

    parameters: int
    gradients: int
    optimizer: int | None
    activations: int
    sample: int | None
    numbers: int
    flops: int

    def rank_bytes(self) -> int:
        """Of a rank that trains."""
        return self.parameters + self.gradients + (self.optimizer or 0) + self.activations


@dataclasses.dataclass(frozen=True)
class Probed:
    """Seconds on this host, and the spread of whole steps.

    Attributes:
        forward_s, backward_s, optimizer_s: of a batch; one_sample_s: forward and backward of a batch of one.
        read_s: of a batch from the data, nothing read ahead; apply_s: a server's plain update with a whole gradient.
        steps_s: of every whole step that was timed; bytes_per_s: that memory copies.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    one_sample_s: float
    read_s: float
    apply_s: float
    bytes_per_s: float
    steps_s: tuple[float, ...]
    device: str


def weigh(job: Job, catalogue: Catalogue) -> tuple[Weights, nn.Module, Any]:
    """(what a job weighs, its module, its optimizer)."""
    from torch.utils.flop_counter import FlopCounterMode

    module, optimizer = build(job, None, torch.device("cpu"))
    with job.data.reader(catalogue, job.seed) as reader:
        batch = _batch(job, reader, 0, catalogue)
    kept: dict[int, int] = {}
    own = {one.untyped_storage().data_ptr() for one in [*module.parameters(), *module.buffers()]}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (pointer := tensor.untyped_storage().data_ptr()) not in own:
            kept[pointer] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = read_loss(job.loss(module, batch)).mean
    del loss
    flops = 0
    try:
        with FlopCounterMode(display=False) as counter:
            read_loss(job.loss(module, batch)).mean.backward()
        flops = int(counter.get_total_flops())
    except Exception:  # it knows few operations, and the job's own code may refuse its tensors
        module.zero_grad()
    trained = [one for one in module.parameters() if one.requires_grad]
    specs = catalogue.arrays.values()
    weights = Weights(
        parameters=_bytes(module.parameters()),
        gradients=_bytes(trained),
        optimizer=_state_bytes(trained, optimizer),
        activations=sum(kept.values()),
        sample=None if any(one.variable for one in specs) else sum(one.sample_bytes for one in specs),
        numbers=sum(one.numel() for one in trained),
        flops=flops,
    )
    return weights, module, optimizer


def probe(job: Job, catalogue: Catalogue, module: nn.Module, optimizer: Any, budget_s: float) -> Probed:
    """Time the job's steps here, for about `budget_s` in all."""
    device = pick_device(0)
    module.to(device).train()
    with job.data.reader(catalogue, job.seed) as reader:
        timed = _Timed(job, reader, catalogue, module, optimizer, device)
        timed.step(0)  # buffers are allocated
        rows: list[tuple[float, float, float, float]] = []
        end_s = time.perf_counter() + 0.7 * budget_s
        while len(rows) < LEAST_STEPS or time.perf_counter() < end_s:
            rows.append(timed.step(len(rows) + 1))
        single: list[float] = []
        end_s = time.perf_counter() + 0.1 * budget_s
        while len(single) < LEAST_STEPS or time.perf_counter() < end_s:
            _, forward_s, backward_s, _ = timed.step(len(single), 1)
            single.append(forward_s + backward_s)
    read_s, forward_s, backward_s, optimizer_s = (
        statistics.median(column) for column in zip(*rows, strict=True)
    )
    source, target = torch.zeros(_COPIED), torch.zeros(_COPIED)
    numbers = sum(one.numel() for one in module.parameters() if one.requires_grad)
    held, gradient = torch.zeros(numbers), torch.zeros(numbers)
    copy_s = _median_s(lambda: target.copy_(source), 0.05 * budget_s)
    return Probed(
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=optimizer_s,
        one_sample_s=statistics.median(single),
        read_s=read_s,
        apply_s=_median_s(lambda: held.add_(gradient, alpha=-0.1), 0.05 * budget_s),
        bytes_per_s=2 * 4 * _COPIED / copy_s,
        steps_s=tuple(sum(row[1:]) for row in rows),
        device=str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
    )


class _Timed:
    """Steps of a job, timed in parts."""

    def __init__(
        self,
        job: Job,
        reader: Reader,
        catalogue: Catalogue,
        module: nn.Module,
        optimizer: Any,
        device: torch.device,
    ):
        self.job, self.reader, self.catalogue = job, reader, catalogue
        self.module, self.optimizer, self.device = module, optimizer, device

    def step(self, number: int, size: int | None = None) -> tuple[float, float, float, float]:
        """Seconds of reading, forward, backward and the optimizer."""
        marks = [self._now_s()]
        batch = _batch(self.job, self.reader, number, self.catalogue, size)
        batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
        marks.append(self._now_s())
        loss = read_loss(self.job.loss(self.module, batch)).mean
        marks.append(self._now_s())
        loss.backward()
        marks.append(self._now_s())
        if size is None:
            self.optimizer.step()
        marks.append(self._now_s())
        self.optimizer.zero_grad()
        read_s, forward_s, backward_s, optimizer_s = (
            after - before for before, after in zip(marks, marks[1:], strict=False)
        )
        return read_s, forward_s, backward_s, optimizer_s

    def _now_s(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _batch(
    job: Job, reader: Reader, number: int, catalogue: Catalogue, size: int | None = None
) -> dict[str, torch.Tensor]:
    count = min(size or job.batch_size, catalogue.num_samples)
    places = catalogue.num_samples // count
    return reader.batch(0, number % places * count, count)


def _bytes(tensors: Any) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


def _state_bytes(trained: list[nn.Parameter], optimizer: Any) -> int | None:
    """Of the state after a step with gradients of zero, the parameters being put back."""
    before = [one.detach().clone() for one in trained]
    for one in trained:
        one.grad = torch.zeros_like(one)
    try:
        optimizer.step()
        states = [one for state in optimizer.state.values() for one in state.values()]
        return _bytes(one for one in states if isinstance(one, torch.Tensor))
    except Exception:  # such as one that wants a closure
        return None
    finally:
        with torch.no_grad():
            for one, old in zip(trained, before, strict=True):
                one.copy_(old)
                one.grad = None


def _median_s(function: Callable[[], object], budget_s: float) -> float:
    taken: list[float] = []
    end_s = time.perf_counter() + budget_s
    while len(taken) < LEAST_STEPS or time.perf_counter() < end_s:
        began_s = time.perf_counter()
        function()
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)
