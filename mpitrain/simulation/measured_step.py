"""The time of a job's step, taken here: what the compute law `measured(5)` stands for.

Invariants: the job's own module, loss, optimizer, reader and codec run, on a module that the simulation does not see;
random numbers stand afterwards where they stood before. What is timed is one batch, as it is read and computed at once.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mpitrain.codecs import Part, add_message
from mpitrain.codecs.base import Codec
from mpitrain.data.format.catalogue import Catalogue
from mpitrain.data.read.batch import to_device
from mpitrain.devices import accelerator, draws
from mpitrain.embedding.trained_rows import look_up_here
from mpitrain.job import Job
from mpitrain.model.gradient.loss import BatchLoss
from mpitrain.model.gradient.sparse_gradients import sparse_parameters
from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.model.wire.codec_registry import make_encoder, make_layout_of
from mpitrain.simulation.step_costs import gradient_buckets
from mpitrain.simulation.workload import codec_of
from mpitrain.strategies.allreduce import AllReduce
from mpitrain.system.host_load import HostLoad, Watch
from mpitrain.training.measure import build
from mpitrain.training.recipe import recipe_of
from mpitrain.training.synchronous.stepper import Batch, Stepper
from mpitrain.training.validations.validation import make_measure
from mpitrain.virtual.compute import BatchCourse, ComputeLaw
from mpitrain.virtual.compute_laws import MeasuredCompute, Resampled
from mpitrain.virtual.costs import Costs

WARMUP, LEAST = 2, 3  # batches: before the first that counts, and at least so many that do
MOST_CODED = 1 << 22  # numbers that are coded; the rest is extrapolated


class _TimedStepper(Stepper):
    """A stepper that takes the time of its parts. `now_s`: the clock, when the device has done what it was asked."""

    def __init__(self, job: Job, epoch_samples: int, now_s: Callable[[], float]):
        super().__init__(job, recipe_of(job, job.strategy or AllReduce(), 1, epoch_samples), 0)
        self.now_s = now_s
        self.forward_s: list[float] = []
        self.forward_ended_s = 0.0

    def forward(self, batch: Batch) -> BatchLoss:
        began_s = self.now_s()
        returned = super().forward(batch)
        self.forward_ended_s = self.now_s()
        self.forward_s.append(self.forward_ended_s - began_s)
        return returned


def with_measured(
    law: ComputeLaw, job: Job, lr: float | None, catalogue: Catalogue
) -> tuple[ComputeLaw, dict[str, Any]]:
    """(the law, with the times of the job's batches wherever it says `measured`; what a result says of those)."""
    if isinstance(law, MeasuredCompute):
        return measure_step(job, lr, catalogue, law.for_s)
    inner = getattr(law, "law", None)
    if not isinstance(inner, ComputeLaw):
        return law, {}
    found, measured = with_measured(inner, job, lr, catalogue)
    changes: dict[str, Any] = {"law": found}
    return (dataclasses.replace(law, **changes), measured) if measured else (law, {})


def charged(costs: Costs, measured: dict[str, Any]) -> Costs:
    """The costs, with what was measured of updates, coding and validations where nothing is said of them."""
    if not measured:
        return costs
    changes: dict[str, float] = {}
    num_bytes, update_s, encode_s = (measured[key] for key in ("trained_bytes", "optimizer_s", "encode_s"))
    if not costs.memory_gb_per_s and update_s:
        changes["memory_gb_per_s"] = costs.passes * num_bytes / update_s / 1e9
    if not costs.codec_gb_per_s and encode_s:
        changes["codec_gb_per_s"] = num_bytes / encode_s / 1e9
    if not costs.decode_gb_per_s and measured["decode_s"]:
        changes["decode_gb_per_s"] = num_bytes / measured["decode_s"] / 1e9
    if not costs.validate_s:
        changes["validate_s"] = measured["validate_s"]
    return dataclasses.replace(costs, **changes)


def measure_step(
    job: Job,
    lr: float | None,
    catalogue: Catalogue,
    for_s: float,
    device: torch.device | None = None,
    samples: int | None = None,
) -> tuple[Resampled, dict[str, Any]]:
    """(the law of a batch's times, what a result says of them), from as many batches as take so many seconds.

    Args:
        device: that computes; None: the CPU.
        samples: of a batch; None: as many as the job computes at once.
    """
    states = draws.RandomStates()
    try:
        return _measure(job, lr, catalogue, for_s, device or torch.device("cpu"), samples)
    finally:
        states.restore()


def build_to_measure(job: Job, lr: float | None, device: torch.device) -> tuple[nn.Module, Optimizer]:
    """The job's module and optimizer in one process, whatever its strategy is; rows that live on servers begin here."""
    module, optimizer = build(dataclasses.replace(job, strategy=None), lr, device)
    look_up_here(module, job.seed)
    return module, optimizer


def _measure(
    job: Job, lr: float | None, catalogue: Catalogue, for_s: float, device: torch.device, samples: int | None
) -> tuple[Resampled, dict[str, Any]]:
    def now_s() -> float:
        accelerator.wait_for_all(device)
        return time.perf_counter()

    watch = Watch()
    module, optimizer = build_to_measure(job, lr, device)
    stepper = _TimedStepper(job, catalogue.num_samples, now_s)
    stepper.train(module, Rates(optimizer))
    count = min(samples or job.part_samples or job.step_samples, catalogue.num_samples)
    parameters = [one for one in module.parameters() if one.requires_grad]
    came_s: dict[int, float] = {}  # by parameter: when its gradient did
    handles = [
        one.register_post_accumulate_grad_hook(
            lambda _, number=number: came_s.update({number: time.perf_counter()})
        )
        for number, one in enumerate(parameters)
    ]
    buckets = gradient_buckets(parameters, sparse_parameters(module))
    gradients, reads, updates = list[float](), list[float](), list[float]()
    ends: list[list[float]] = []  # of each bucket's gradients, since the backward pass began
    with job.data.reader(catalogue, job.seed) as reader:
        deadline_s, number = time.perf_counter() + for_s, 0
        while number < WARMUP + LEAST or time.perf_counter() < deadline_s:
            start = number * count % (catalogue.num_samples - count + 1)
            began_s = now_s()
            batch = to_device(reader.batch(0, start, count), device)
            read_s = now_s()
            stepper.compute([(batch, count)], count, count)
            computed_s = now_s()
            stepper.step_optimizer()
            ended_s = now_s()
            reads.append(read_s - began_s)
            gradients.append(computed_s - read_s)
            updates.append(ended_s - computed_s)
            since_s = stepper.forward_ended_s
            ends.append([max(came_s.get(one, since_s) for one in bucket) - since_s for bucket in buckets])
            number += 1
    for handle in handles:
        handle.remove()
    median = statistics.median
    forward_s = median(stepper.forward_s[WARMUP:])
    gradient_s = median(gradients[WARMUP:])
    found = {
        "batches": number - WARMUP,
        "batch_samples": count,
        "gradient_s": gradient_s,
        **_spread(gradients[WARMUP:], watch.load()),
        "forward_s": forward_s,
        "backward_s": gradient_s - forward_s,
        "bucket_ends_s": [median(column) for column in zip(*ends[WARMUP:], strict=True)],
        "read_s": median(reads[WARMUP:]),
        "optimizer_s": median(updates[WARMUP:]),
        "trained_bytes": sum(one.nbytes for one in parameters),
        **_coding_s(codec_of(job.strategy) if job.strategy else None, module),
        "validate_s": _validate_s(job, module, device, now_s, for_s),
    }
    return Resampled(tuple(gradients[WARMUP:]), *_course(found)), found


def _spread(times_s: list[float], load: HostLoad) -> dict[str, float]:
    """Between which bounds four of five batches were, and how busy others kept the host."""
    ordered = sorted(times_s)
    last = len(ordered) - 1
    low_s, high_s = ordered[round(0.1 * last)], ordered[round(0.9 * last)]
    return {
        "low_s": low_s,
        "high_s": high_s,
        "others_share": load.others_share,
        "steal_share": load.steal_share,
    }


def spread_text(measured: Mapping[str, Any]) -> str:
    """What was measured of batches, how far that may be from the truth, and whether the host was loaded."""
    low, middle, high = (1e3 * measured[key] for key in ("low_s", "gradient_s", "high_s"))
    load = HostLoad(measured["others_share"], measured["steal_share"])
    off = f"{low / middle - 1:+.0%} to {high / middle - 1:+.0%}"
    batches = f"four of five batches took {low:.3g} to {high:.3g} ms, {off} of the median"
    return f"{load.told()}; {batches}: times of computing are known to that"


def _course(found: dict[str, Any]) -> BatchCourse:
    """Of the batches that were timed."""
    backward_s, gradient_s = found["backward_s"], found["gradient_s"]
    if not 0 < backward_s < gradient_s:
        return BatchCourse()
    ready = tuple(min(1.0, end_s / backward_s) for end_s in found["bucket_ends_s"])
    return BatchCourse(1.0 - backward_s / gradient_s, ready)


def _validate_s(
    job: Job, module: nn.Module, device: torch.device, now_s: Callable[[], float], most_s: float
) -> float:
    """Seconds of a whole validation; of one that would take longer than `most_s`, from as many batches as fit."""
    measure = make_measure(job, module, job.validate.scan() if job.validate else None, device)
    if measure is None:
        return 0.0
    measure.part(0, 1)
    number, began_s = 0, now_s()
    while number < measure.num_batches and (not number or now_s() < began_s + most_s):
        measure.part(number, number + 1)
        number += 1
    passes = 1 + (job.ema is not None and job.validate_ema)
    return passes * (now_s() - began_s) * measure.num_batches / number


def _coding_s(codec: Codec | None, module: nn.Module) -> dict[str, float]:
    """Seconds of encoding a gradient of the module, and of decoding it into a sum."""
    if codec is None:
        return {"encode_s": 0.0, "decode_s": 0.0}
    entries, coded = list[tuple[str, tuple[int, ...]]](), 0
    shapes = [(name, tuple(one.shape)) for name, one in module.named_parameters() if one.requires_grad]
    total = sum(torch.Size(shape).numel() for _, shape in shapes)
    for entry in shapes:
        if not entries or coded + torch.Size(entry[1]).numel() <= MOST_CODED:
            entries.append(entry)
            coded += torch.Size(entry[1]).numel()
    encoder = make_encoder(codec)
    encoder.warmup_steps = 0
    layout = make_layout_of(entries)
    parts = [Part(torch.randn(coded, generator=torch.Generator().manual_seed(0)), layout)]
    message, sums = encoder.encode(parts), [Part(torch.zeros(coded), layout)]
    encode_s, decode_s = (
        statistics.median(_seconds(task) for _ in range(LEAST)) * total / coded
        for task in (lambda: encoder.encode(parts), lambda: add_message(message, sums))
    )
    return {"encode_s": encode_s, "decode_s": decode_s}


def _seconds(task: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    task()
    return time.perf_counter() - began_s
