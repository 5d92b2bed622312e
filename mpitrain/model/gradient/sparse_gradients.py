"""Gradients of `nn.Embedding(sparse=True)` and `EmbeddingBag(sparse=True)`: the rows that a batch has touched, and no
others.

    SGD        w_r <- w_r - eta g_r                                    for every touched row r
    Adagrad    s_r <- s_r + g_r^2,   w_r <- w_r - eta g_r / (sqrt(s_r) + eps)

Invariants: a row that was not touched has a gradient of zero, so these two leave it, and what they remember of it, as
it is: sparse and dense gradients train alike. Momentum, Adam's means and weight decay move such a row too; optimizers
that have these are refused, but for torch's SparseAdam, whose definition it is to leave the row alone. Rows that occur
several times in a batch are added up before anything that is not linear sees them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from mpitrain.embedding.tables import served_layers
from mpitrain.errors import UsageError
from mpitrain.model.building.compiling import unwrap_compiled
from mpitrain.model.gradient.user_code import unused_parameters

_KNOWN = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)
_WAY_OUT = "leave sparse=True out, or use SGD without momentum, Adagrad or SparseAdam"


def sparse_layers(module: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """The trained layers of a model, by name, that have sparse gradients, as DDP knows them."""
    return {
        name: layer
        for name, layer in unwrap_compiled(module).named_modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse and layer.weight.requires_grad
    }


def sparse_parameters(module: nn.Module) -> set[int]:
    """The `id` of every parameter whose gradient is sparse."""
    return {id(one.weight) for one in (*sparse_layers(module).values(), *served_layers(module).values())}


def row_bytes(table: torch.Tensor) -> int:
    """Of one row of an embedding."""
    return table[0].numel() * table.itemsize


def check_sparse_layers(module: nn.Module, refused: str) -> None:
    """Refuse layers with sparse gradients under a strategy that says `refused`, which is empty where it takes them.

    Raises:
        UsageError: names one.
    """
    for name, layer in sparse_layers(module).items() if refused else ():
        kind = type(layer).__name__
        raise UsageError(f"layer {name or kind!r} is {kind}(sparse=True): {refused}; leave sparse=True out")


def check_served_layers(module: nn.Module, refused: str) -> None:
    """Refuse layers whose rows live on servers where there are none, or where they cannot.

    Raises:
        UsageError: names one.
    """
    for name in served_layers(module) if refused else ():
        raise UsageError(
            f"layer {name or 'of the model'!r} is a ServedEmbedding: {refused}; nn.Embedding holds its rows on "
            "every worker"
        )


def check_sparse_optimizer(module: nn.Module, optimizer: Any) -> None:
    """Refuse an optimizer that cannot step with sparse gradients, or that would train otherwise than with dense ones.

    Raises:
        UsageError: says which of its options stands against it.
    """
    sparse, name = sparse_parameters(module), type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        dense = [one for group in optimizer.param_groups for one in group["params"] if id(one) not in sparse]
        if dense:
            raise UsageError(
                f"Job: SparseAdam takes sparse gradients only, and a parameter of shape {tuple(dense[0].shape)} has "
                'dense ones; name two optimizers of two parts of the model (Job(optimizer={"tables": ..., "rest": '
                "...}, step=...)), or use Adagrad for all, or Adam and layers without sparse=True"
            )
    for group in optimizer.param_groups:
        if not any(id(parameter) in sparse for parameter in group["params"]):
            continue
        if type(optimizer).__module__.startswith("torch.") and not isinstance(optimizer, _KNOWN):
            raise UsageError(f"Job: {name} takes no sparse gradients: {_WAY_OUT}")
        for option in ("momentum", "weight_decay"):
            if group.get(option):
                raise UsageError(
                    f"Job: {name}({option}={group[option]:g}) moves rows that a batch has not touched, which sparse "
                    f"gradients leave out: {_WAY_OUT}; a parameter group of its own may have another {option}"
                )


@contextlib.contextmanager
def explained_tables(module: nn.Module, loss: torch.Tensor) -> Iterator[None]:
    """Around a backward pass under DDP, which does not know a table without a gradient: say which one it is.

    Raises:
        UsageError: the loss leaves out a table with sparse gradients.
    """
    try:
        yield
    except RuntimeError as error:
        if "Expected sparse gradient to be defined" not in str(error):
            raise
        left_out = set(unused_parameters(module, loss))
        tables = [name for name in sparse_layers(module) if f"{name}.weight" in left_out]
        raise left_out_error(tables) from None


def left_out_error(tables: Sequence[str]) -> UsageError:
    """What to say of tables that got no gradient in a step."""
    return UsageError(
        f"the loss does not depend on {', '.join(tables) or 'a table'} in this step, and torch's DDP takes no missing "
        "gradient of a layer with sparse=True: look up no rows of it where it has none to give, such as "
        "table(words[:0]).sum(), added to what the model returns, or leave sparse=True out"
    )


@torch.no_grad()
def numbers_of_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """The gradients that there are, to look at and to scale in place: dense tensors, of sparse ones the rows that were
    touched, each once."""
    found = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            if not gradient.is_coalesced():
                gradient = parameter.grad = gradient.coalesce()
            gradient = gradient._values()
        if gradient is not None:
            found.append(gradient)
    return found
