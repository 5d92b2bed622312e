"""What a job's steps weigh and take on this host: bytes of memory without a clock, and seconds by one.

Invariants: it reads the job's own batches and computes its own loss; nothing is trained that anybody keeps. Seconds
are medians of several steps, within a budget.
"""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn

from mpitrain.data.format.catalogue import Catalogue
from mpitrain.devices import accelerator
from mpitrain.doctor.speed import times
from mpitrain.job import Job
from mpitrain.model.gradient.loss import read_loss
from mpitrain.model.optimizers.optimizer import state_bytes
from mpitrain.simulation.measured_step import build_to_measure, measure_step
from mpitrain.training.measure import pick_device

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
        read_s: of a batch from the data, nothing read ahead; apply_s: of an update of all parameters, as a server's;
        validate_s: of a whole validation, 0 where the job has none.
        gradient_s, low_s, high_s: of a batch, the median, and the bounds of four batches of five.
        others_share, steal_share: of the processors' time, that other processes used meanwhile, and the host's host.
        start_s: until a process has imported what a rank needs, the files in the cache.
        steps_s: of every whole step that was timed, the optimizer's being its median; bytes_per_s: that memory copies.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    one_sample_s: float
    read_s: float
    apply_s: float
    validate_s: float
    bytes_per_s: float
    gradient_s: float
    low_s: float
    high_s: float
    others_share: float
    steal_share: float
    start_s: float
    steps_s: tuple[float, ...]
    device: str


def weigh(job: Job, catalogue: Catalogue) -> tuple[Weights, nn.Module, Any]:
    """(what a job weighs, its module, its optimizer)."""
    from torch.utils.flop_counter import FlopCounterMode

    module, optimizer = build_to_measure(job, None, torch.device("cpu"))
    with job.data.reader(catalogue, job.seed) as reader:
        batch = reader.batch(0, 0, min(job.batch_size, catalogue.num_samples))
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
        optimizer=state_bytes(trained, optimizer),
        activations=sum(kept.values()),
        sample=None if any(one.variable for one in specs) else sum(one.sample_bytes for one in specs),
        numbers=sum(one.numel() for one in trained),
        flops=flops,
    )
    return weights, module, optimizer


def probe(job: Job, lr: float | None, catalogue: Catalogue, budget_s: float) -> Probed:
    """Time the job's steps here, for about `budget_s` in all, as the compute law `measured` does."""
    device = pick_device(job, 0)
    law, whole = measure_step(job, lr, catalogue, 0.7 * budget_s, device)
    _, single = measure_step(job, lr, catalogue, 0.1 * budget_s, device, samples=1)
    source, target = torch.zeros(_COPIED), torch.zeros(_COPIED)
    copy_s = statistics.median(times(lambda: target.copy_(source), 0.1 * budget_s))
    return Probed(
        forward_s=whole["forward_s"],
        backward_s=whole["backward_s"],
        optimizer_s=whole["optimizer_s"],
        one_sample_s=single["gradient_s"],
        read_s=whole["read_s"],
        apply_s=whole["optimizer_s"],
        validate_s=whole["validate_s"],
        **{key: whole[key] for key in ("gradient_s", "low_s", "high_s", "others_share", "steal_share")},
        start_s=_start_s(),
        bytes_per_s=2 * 4 * _COPIED / copy_s,
        steps_s=tuple(one + whole["optimizer_s"] for one in law.times),
        device=accelerator.name_of(device),
    )


def _start_s() -> float:
    """Of a process like a rank, the shorter of two: the first one reads files."""
    command = [sys.executable, "-c", "import mpitrain.training.session"]
    taken = []
    for _ in range(2):
        began_s = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        taken.append(time.perf_counter() - began_s)
    return min(taken)


def _bytes(tensors: Any) -> int:
    return sum(one.nbytes for one in tensors)
