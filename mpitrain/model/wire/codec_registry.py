"""The encoder that a strategy's codec asks for, and layouts by parameter name.

Invariants: a codec's fields are its encoder's arguments; nothing is translated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mpitrain.codecs import Encoder, Field, Layout
from mpitrain.codecs.base import Codec
from mpitrain.errors import UsageError


def make_encoder(codec: Codec, num_workers: int = 1, worker: int = 0, seed: int = 0) -> Encoder:
    """An encoder for one stream of messages of one of `num_workers` workers. `none` has no encoder."""
    options = {field.name: getattr(codec, field.name) for field in dataclasses.fields(codec)}
    return codec.encoder(**options, num_workers=num_workers, worker=worker, seed=seed)


def merge_states(first: dict[str, Any], states: Sequence[dict[str, Any]], factor: float) -> dict[str, Any]:
    """The state of an encoder that takes over from several, or none: residuals and momenta are added and scaled by
    `factor`; the step and what all workers share come from `first`. A single state with factor 1 stays as it is.
    """
    if len(states) == 1 and factor == 1.0:
        return states[0]
    tensors = {name: tensor for name, tensor in first["tensors"].items() if name.startswith("basis/")}
    for state in states:
        for name, tensor in state["tensors"].items():
            if not name.startswith("basis/"):
                tensors[name] = tensor * factor + tensors.get(name, 0.0)
    return {**first, "tensors": tensors}


def make_layout_of(entries: Iterable[tuple[str, Sequence[int]]]) -> Layout:
    """Fields one after another, from names and shapes."""
    fields, start = [], 0
    for name, shape in entries:
        fields.append(Field(name, tuple(shape), start))
        start += fields[-1].numel
    return tuple(fields)


def check_optimizer(codec: Codec, optimizer: torch.optim.Optimizer) -> None:
    """Refuse momentum twice.

    Raises:
        UsageError: the codec and the optimizer both have a momentum.
    """
    if getattr(codec, "momentum", 0.0) and any(group.get("momentum") for group in optimizer.param_groups):
        raise UsageError(
            f"{codec}: the workers' momentum replaces the optimizer's (Lin et al. 2018): set momentum=0 there, or here"
        )
