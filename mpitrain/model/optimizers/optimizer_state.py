"""What an optimizer that has stepped before takes along to the servers.

Invariants: state of single elements is cut like the parameters it belongs to; state of a whole parameter (Adam's step)
must be the same throughout a slice, for there is one update of it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mpitrain.errors import UsageError


def state_slices(
    optimizer: Optimizer,
    parameters: list[nn.Parameter],
    pieces: list[tuple[int, int, int, int]],
    slices: list[tuple[int, int, int]],
) -> list[dict[str, Any]]:
    """What the optimizer remembers of each slice of a shard; empty where it has not stepped yet.

    Args:
        parameters: in the order of the layout; pieces, slices: of the shard, as `Layout` gives them.

    Raises:
        UsageError: parameters of one group that have taken different numbers of steps, or state that is neither of
            a parameter's shape nor a number.
    """
    found = []
    for _, start, stop in slices:
        inside = [piece for piece in pieces if start <= piece[3] < stop]
        states = [optimizer.state.get(parameters[index], {}) for index, *_ in inside]
        keys = {tuple(state) for state in states}
        if len(keys) > 1:
            raise UsageError(_UNEVEN.format(name=type(optimizer).__name__))
        merged = {}
        for key in states[0] if states else ():
            values = [state[key] for state in states]
            merged[key] = _merged(optimizer, key, values, [parameters[piece[0]] for piece in inside], inside)
        found.append(merged)
    return found


def state_digest(optimizer: Optimizer, parameters: list[nn.Parameter]) -> str:
    """A short text, equal where ranks hand over the same state; empty without any."""
    rows = [
        f"{index} {key} {_summary(value)}"
        for index, parameter in enumerate(parameters)
        for key, value in optimizer.state.get(parameter, {}).items()
    ]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:12] if rows else ""


def _summary(value: object) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return f"{tuple(value.shape)} {float(torch.linalg.vector_norm(value.detach().double()))!r}"


_UNEVEN = (
    "the {name} given to mpitrain remembers different things of parameters of one group, which a server would have to "
    "update together; hand over an optimizer that has not stepped yet, or has stepped on all of its parameters"
)


def _merged(
    optimizer: Optimizer, key: str, values: list[Any], parameters: list[nn.Parameter], pieces: list[Any]
) -> Any:
    first = values[0]
    of_elements = any(parameter.dim() for parameter in parameters) or key not in ("step", "mu_product")
    if of_elements and all(
        isinstance(value, torch.Tensor) and value.shape == parameter.shape
        for value, parameter in zip(values, parameters, strict=True)
    ):
        flat = [
            value.detach().cpu().reshape(-1)[a:b] for value, (_, a, b, _) in zip(values, pieces, strict=True)
        ]
        return torch.cat(flat)
    if any(_number(value) != _number(first) for value in values):
        raise UsageError(_UNEVEN.format(name=type(optimizer).__name__))
    return first.detach().cpu().clone() if isinstance(first, torch.Tensor) else first


def _number(value: object) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
