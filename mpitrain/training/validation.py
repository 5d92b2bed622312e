"""The validation loop: one walk through batches of the validation set, for whole models and for parts of split ones.

Invariants: losses and metrics are means over samples, or sums over weights where the loss says so, so the size of the
batches does not matter. The module goes on in the mode in which it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from mpitrain.data import Catalogue
from mpitrain.data.read.ragged import num_samples_in
from mpitrain.data.read.reader import Reader
from mpitrain.job import Job
from mpitrain.model.loss import Tally
from mpitrain.reporting.targets import LOSS, check_targets
from mpitrain.training.best_model import Validations

Batch = dict[str, torch.Tensor]
Measure = Callable[..., dict[str, float]]  # (accepted samples so far, or None) -> metrics
LEAST_BATCH = 256  # validation needs no gradients, so its batches may be larger than those of the training


def open_validation(job: Job, catalogue: Catalogue | None) -> Reader:
    """A reader of the validation set, which this job has."""
    assert job.validate is not None and catalogue is not None
    return job.validate.reader(catalogue, job.seed)


def batches_of(job: Job, reader: Reader) -> Iterator[Batch]:
    """The validation set in order."""
    return reader.sequential(max(LEAST_BATCH, job.batch_size))


def losses_of(job: Job, module: nn.Module, batch: Batch) -> dict[str, Any]:
    """What `module` gives for one batch: the loss and the job's metrics, as its functions return them."""
    return {LOSS: job.loss(module, batch), **(job.metrics(module, batch) if job.metrics else {})}


@torch.no_grad()
def add_up(
    module: nn.Module,
    batches: Iterable[tuple[Batch, bool]],
    device: torch.device,
    losses: Callable[[Batch], Mapping[str, Any]],
    on_batch: Callable[[], None] = lambda: None,
) -> Tally:
    """Walk through the batches and add up what they give.

    Args:
        batches: each with whether it counts here; one that does not is computed all the same, since other ranks may
            wait for this one's part in it.
        losses: what a batch gives by name, such as `losses_of`; nothing on a rank that does not know.
        on_batch: is called after every batch (a watchdog that is to see progress).
    """
    tally = Tally()
    was_training = module.training
    module.eval()
    for batch, counts in batches:
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        num_samples = num_samples_in(batch)
        found = losses(batch)
        for name, one in found.items() if counts else ():
            tally.add(name, one, num_samples)
        on_batch()
    module.train(was_training)
    return tally


def make_measure(
    job: Job,
    module: nn.Module,
    catalogue: Catalogue | None,
    device: torch.device,
    on_batch: Callable[[], None] = lambda: None,
    validations: Validations | None = None,
) -> Measure | None:
    """A function that measures `module` on the whole validation set: `validation_loss`, the mean over its samples, and
    the job's metrics, the mean over batches by their samples. None where the job has no validation set.

    It is called with the samples that were accepted so far, or without where the figures are none to choose the best
    model by: those of a run that is to go on later. It raises UsageError if a target of the job, or what the best model
    is chosen by, is of a metric that is not measured.

    Args:
        catalogue: of the validation set; on_batch: as in `add_up`.
        validations: judges what is measured.
    """
    if catalogue is None:
        return None
    reader = open_validation(job, catalogue)

    def measure(samples: int | None = None) -> dict[str, float]:
        batches = ((batch, True) for batch in batches_of(job, reader))
        tally = add_up(module, batches, device, lambda batch: losses_of(job, module, batch), on_batch)
        check_targets(job.target, tally.sums)
        metrics = tally.means()
        if validations is not None and samples is not None:
            validations.take(metrics, samples, module.state_dict)
        return metrics

    return measure
