"""Soups: one model whose weights are the mean of several models' weights (Wortsman et al. 2022, arXiv:2203.05482).

Such a mean is a good model where the ingredients lie in one basin of the loss, as models do that were tuned from the
same weights; models that were begun from weights of their own have no such mean, and a greedy soup then keeps the best
alone.

Invariants: floating-point tensors are averaged in float64; counters and the like are the first ingredient's. Running
statistics of batch normalization are those of the averaged model, measured anew on the training data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from mpitrain.data.read.batch import to_device
from mpitrain.errors import UsageError
from mpitrain.job import Job
from mpitrain.model.gradient.user_code import Checked
from mpitrain.reporting.targets import Choice
from mpitrain.torch_versions import BatchNorm
from mpitrain.training.resuming.initial_weights import MOST_NAMES
from mpitrain.training.validations.validation import LEAST_BATCH

SOUPS = ("uniform", "greedy")
MOST_SAMPLES = 16384  # of the training data, for running statistics


def check_one_architecture(modules: Mapping[str, nn.Module]) -> None:
    """Refuse models whose weights have no mean.

    Raises:
        UsageError: names the first two that do not agree, and where.
    """
    (first, model), *others = modules.items()
    shapes = _shapes(model)
    for name, other in others:
        found = _shapes(other)
        differing = [key for key in {**shapes, **found} if shapes.get(key) != found.get(key)]
        text = ", ".join(
            f"{key} is {shapes.get(key, 'missing')} in {first} and {found.get(key, 'missing')} in {name}"
            for key in differing[:MOST_NAMES]
        )
        if not text and str(model) != str(other):
            text = "their layers are not the same"
        if text:
            raise UsageError(
                f"--soup averages weights, and the architectures of {first} and {name} do not agree: {text}; leave out "
                "--soup, and their answers are combined"
            )


def _shapes(module: nn.Module) -> dict[str, str]:
    return {
        name: f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in module.state_dict().items()
    }


def mean_of(job: Job, modules: Sequence[nn.Module], weights: Sequence[float]) -> nn.Module:
    """A module with the weighted mean of the modules' weights, in evaluation mode."""
    made = copy.deepcopy(modules[0])
    states = [module.state_dict() for module in modules]
    total = sum(weights)
    mean = {}
    for name, first in states[0].items():
        if not first.is_floating_point():
            continue
        parts = (
            state[name].double() * (weight / total) for state, weight in zip(states, weights, strict=True)
        )
        mean[name] = torch.stack(list(parts)).sum(0).to(first.dtype)
    made.load_state_dict(mean, strict=False)
    if len(modules) > 1:
        _measure_statistics(job, made)
    return made.eval()


@torch.no_grad()
def _measure_statistics(job: Job, module: nn.Module) -> None:
    """Take the running statistics of batch normalization anew, as means over the training data."""
    layers = [
        one for one in module.modules()
        if isinstance(one, BatchNorm) and one.track_running_stats
    ]  # fmt: skip
    if not layers:
        return
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the mean over all batches
        layer.train()
    catalogue = job.data.scan()
    loss = Checked(job.loss, "loss", job.precision)
    with torch.random.fork_rng(), job.data.reader(catalogue, job.seed) as reader:
        batches = reader.sequential(
            max(LEAST_BATCH, job.batch_size), 0, min(catalogue.num_samples, MOST_SAMPLES)
        )
        device = next(module.parameters()).device
        for batch in batches:
            loss(module, to_device(batch, device))
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum


def greedy(
    job: Job,
    ranked: Sequence[tuple[str, nn.Module, float]],
    by: Choice,
    measure: Callable[[nn.Module], dict[str, float]],
) -> tuple[nn.Module, list[str]]:
    """The greedy soup, and its ingredients: from the best model on, one after the other stays in the mean if that does
    not make the metric worse.

    Args:
        ranked: name, model and validation metric, the best first.
    """
    (name, best, value), *others = ranked
    names, modules, made = [name], [best], best
    for name, module, _ in others:
        candidate = mean_of(job, [*modules, module], [1.0] * (len(modules) + 1))
        found = measure(candidate)[by.metric]
        if found == value or by.is_better(found, value):
            names, modules, made, value = [*names, name], [*modules, module], candidate, found
    return made, names
