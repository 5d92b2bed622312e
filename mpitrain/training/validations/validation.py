"""Validation: what a module gives on a validation set, batch by batch, and what that makes of the whole set.

Invariants: the batches are the same however many ranks share them, each rank observes some of them, and one rank adds
up what all have observed, in the order of the batches and in float64. So the figures do not depend on the number of
ranks, to the bit. Losses and metrics are means over samples, or sums over weights where the loss says so, so the size
of the batches does not matter. The module goes on in the mode in which it was.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from mpitrain.data import Catalogue
from mpitrain.data.read.batch import Batch, to_device
from mpitrain.data.read.reader import Reader
from mpitrain.errors import UsageError
from mpitrain.job import EMA_PREFIX, Job
from mpitrain.model.gradient.loss import Tally
from mpitrain.model.metrics import Metrics, Observed
from mpitrain.model.optimizers.ema import Averaged
from mpitrain.reporting.targets import LOSS, check_targets
from mpitrain.training.measure import save_model
from mpitrain.training.validations.best_model import Validations

LEAST_BATCH = 256  # validation needs no gradients, so its batches may be larger than those of the training


class Row(NamedTuple):
    """What one batch gave: its number, sums and what to divide them by, and what is kept of it for each metric of the
    whole set. `prefix`: of the names, where the module held something else than the run's parameters."""

    prefix: str
    number: int
    sums: dict[str, list[float]]
    kept: list[Any]


Part = list[Row]


def open_validation(job: Job, catalogue: Catalogue | None) -> Reader:
    """A reader of the validation set, which this job has."""
    assert job.validate is not None and catalogue is not None
    return job.validate.reader(catalogue, job.seed)


def batch_size_of(job: Job) -> int:
    """Samples of a validation batch."""
    return max(LEAST_BATCH, job.batch_size)


def batch_sizes(job: Job, num_samples: int) -> Callable[[int], int]:
    """Samples of the validation batch with a number, of a set of so many."""
    size = batch_size_of(job)
    return lambda number: min(size, num_samples - number * size)


def batches_of(job: Job, reader: Reader) -> Iterator[tuple[int, Batch]]:
    """The validation set in order, each batch with its number."""
    return enumerate(reader.sequential(batch_size_of(job)))


def metrics_of(job: Job) -> Metrics:
    """The metrics of a job."""
    return Metrics(job.metrics, job.predict, job.precision)


def losses_of(job: Job, metrics: Metrics, module: nn.Module, batch: Batch) -> Observed:
    """What `module` gives for one batch: the loss and the job's metrics, as its functions return them."""
    loss = job.loss(module, batch)
    observed = metrics.observe(module, batch)
    return Observed({LOSS: loss, **observed.means}, observed.kept)


@torch.no_grad()
def observe(
    module: nn.Module,
    batches: Iterable[tuple[int | None, Batch]],
    device: torch.device,
    losses: Callable[[Batch], Observed | None],
    size_of: Callable[[int], int],
    on_batch: Callable[[], None] = lambda: None,
    prefix: str = "",
) -> Part:
    """Walk through the batches, and note what they give.

    Args:
        batches: each with its number; one without is computed all the same, since other ranks may wait for this one's
            part in it, and not counted.
        losses: what a batch gives, such as `losses_of`; None on a rank that does not know.
        size_of: samples of the batch with a number.
        on_batch: is called after every batch (a watchdog that is to see progress).
        prefix: of the names.
    """
    rows: Part = []
    was_training = module.training
    module.eval()
    for number, batch in batches:
        found = losses(to_device(batch, device))
        if number is not None and found is not None:
            tally = Tally()
            for name, one in found.means.items():
                tally.add(prefix + name, one, size_of(number))
            rows.append(Row(prefix, number, tally.sums, found.kept))
        on_batch()
    module.train(was_training)
    return rows


def conclude(metrics: Metrics, rows: Iterable[Row]) -> dict[str, float]:
    """The figures of the whole set, of what was observed of each batch."""
    tally, kept = Tally(), dict[str, list[Any]]()
    for row in sorted(rows, key=lambda row: (row.prefix, row.number)):
        tally.merge(row.sums)
        kept.setdefault(row.prefix, []).append(row.kept)
    found = tally.means()
    for prefix, those in kept.items():
        for name, value in metrics.conclude(those).items():
            if prefix + name in found:
                raise UsageError(f"Job: two of the metrics are called {name!r}")
            found[prefix + name] = value
    return found


class Measure:
    """Measures a module on the whole validation set, or parts of it: `validation_loss`, the mean over its samples, and
    the job's metrics.

    Args:
        job, module: whose loss and metrics of what.
        catalogue: of the validation set.
        device: of the module; on_batch: as in `observe`.
        validations: judges what is measured.
    """

    def __init__(
        self,
        job: Job,
        module: nn.Module,
        catalogue: Catalogue,
        device: torch.device,
        on_batch: Callable[[], None] = lambda: None,
        validations: Validations | None = None,
    ):
        self.job, self.module, self.device, self.on_batch = job, module, device, on_batch
        self.metrics, self.validations = metrics_of(job), validations
        self.num_samples, self.batch_size = catalogue.num_samples, batch_size_of(job)
        self.num_batches = -(-self.num_samples // self.batch_size)
        self._reader = open_validation(job, catalogue)

    def __call__(self, samples: int | None = None, averaged: Averaged | None = None) -> dict[str, float]:
        """Measure all of it on this rank alone; arguments and errors as for `conclude`."""
        return self.conclude(self.part(0, self.num_batches, averaged), samples, averaged)

    def part(self, first: int, end: int, averaged: Averaged | None = None) -> Part:
        """What the batches from number `first` up to `end` give; `averaged`: and once more for the average."""
        rows = self.rows(first, end)
        if averaged is not None:
            with averaged():
                rows += self.rows(first, end, EMA_PREFIX)
        return rows

    def bounds(self, number: int, size: int) -> tuple[int, int]:
        """The first batch of the part that one of `size` measures, and the first one after it."""
        return -(-self.num_batches * number // size), -(-self.num_batches * (number + 1) // size)

    def part_of(self, rank: int, size: int) -> float:
        """How much of the set one of `size` ranks measures, of 1."""
        first, end = self.bounds(rank, size)
        return (end - first) / self.num_batches

    def share(self, rank: int, size: int, averaged: Averaged | None = None) -> Part:
        """The part of one of `size` ranks that share the batches; the first has one, if there is any."""
        return self.part(*self.bounds(rank, size), averaged)

    def batches(self, first: int, end: int) -> Iterator[Batch]:
        """Those batches, on the device."""
        start, stop = first * self.batch_size, min(end * self.batch_size, self.num_samples)
        for batch in self._reader.sequential(self.batch_size, start, stop):
            yield to_device(batch, self.device)

    def rows(self, first: int, end: int, prefix: str = "") -> Part:
        """What those batches give for what the module holds now."""
        if first >= end:
            return []
        start, stop = first * self.batch_size, min(end * self.batch_size, self.num_samples)
        batches = self._reader.sequential(self.batch_size, start, stop)
        return observe(
            self.module, enumerate(batches, first), self.device,
            lambda batch: losses_of(self.job, self.metrics, self.module, batch),
            batch_sizes(self.job, self.num_samples), self.on_batch, prefix,
        )  # fmt: skip

    def conclude(
        self, rows: Iterable[Row], samples: int | None = None, averaged: Averaged | None = None
    ) -> dict[str, float]:
        """The figures, of what all ranks have observed.

        Args:
            samples: that were accepted so far; None where the figures are none to choose the best model by: those of a
                run that is to go on later.
            averaged: what the module held for the names that say so.

        Raises:
            UsageError: a target of the job, or what the best model is chosen by, is of a metric that is not measured.
        """
        metrics = conclude(self.metrics, rows)
        check_targets(self.job.target, metrics)
        if self.validations is not None and samples is not None:
            self.validations.take_metrics(metrics, samples, functools.partial(self._save, averaged))
        return metrics

    def _save(self, averaged: Averaged | None, path: Path, metadata: dict[str, str]) -> None:
        """Write the model that the best metric was measured of."""
        best_by = self.job.best_by
        of_average = averaged and best_by is not None and best_by.metric.startswith(EMA_PREFIX)
        with averaged() if averaged and of_average else contextlib.nullcontext():
            save_model(self.module, path, metadata)


def make_measure(
    job: Job,
    module: nn.Module,
    catalogue: Catalogue | None,
    device: torch.device,
    on_batch: Callable[[], None] = lambda: None,
    validations: Validations | None = None,
) -> Measure | None:
    """What measures `module`; None where the job has no validation set. Arguments as of `Measure`."""
    return None if catalogue is None else Measure(job, module, catalogue, device, on_batch, validations)


@contextlib.contextmanager
def holding(tensors: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> Iterator[None]:
    """For as long as the context lasts `tensors` hold `values`."""
    held = [(tensor, tensor.detach().clone(), value) for tensor, value in zip(tensors, values, strict=True)]
    with torch.no_grad():
        for tensor, _, value in held:
            tensor.copy_(value)
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, own, _ in held:
                tensor.copy_(own)
