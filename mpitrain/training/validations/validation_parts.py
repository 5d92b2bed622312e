"""What ranks have observed of a validation set, as bytes, and how ranks that take the same steps bring it together.

Invariants: nothing is pickled: numbers and texts travel as JSON, tensors as their bytes behind it.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from mpitrain.checkpoint.state_tree import join, split
from mpitrain.model.optimizers.ema import Averaged
from mpitrain.training.agree import attempt
from mpitrain.training.validations.validation import Measure, Part, Row, holding

if TYPE_CHECKING:
    from mpitrain.system.launched.ranks import Ranks

_LENGTH = struct.Struct("<q")


def to_bytes(part: Part) -> bytes:
    """A part of a validation."""
    structure, tensors = split([list(row) for row in part])
    about = {name: [str(one.dtype).split(".")[1], list(one.shape)] for name, one in tensors.items()}
    text = json.dumps([structure, about]).encode()
    bodies = [one.reshape(-1).view(torch.uint8).numpy().tobytes() for one in tensors.values()]
    return b"".join([_LENGTH.pack(len(text)), text, *bodies])


def from_bytes(data: bytes) -> Part:
    """What `to_bytes` wrote."""
    at = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    structure, about = json.loads(data[_LENGTH.size : at])
    tensors = {}
    for name, (dtype, shape) in about.items():
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes:
            body = torch.frombuffer(bytearray(data[at : at + num_bytes]), dtype=tensor.dtype)
            tensor = body.reshape(shape)
        tensors[name], at = tensor, at + num_bytes
    return [Row(*row) for row in join(structure, tensors)]


def gather_parts(runtime: Ranks, part: Part) -> Part:
    """Collective: what all ranks have observed, on rank 0; nothing elsewhere."""
    if runtime.size == 1:
        return part
    gathered = runtime.gather_bytes(to_bytes(part))
    return [row for data in gathered or () for row in from_bytes(data)]


def measure_together(
    runtime: Ranks, measure: Measure, samples: int | None, averaged: Averaged | None = None
) -> dict[str, float]:
    """Collective, where all ranks hold the same parameters: each rank measures its share of the batches with the
    buffers of rank 0, which gets the figures; the other ranks get nothing. Arguments as of `Measure.conclude`."""
    with buffers_of_first(runtime, measure.module):
        part = attempt(runtime, lambda: measure.share(runtime.rank, runtime.size, averaged))
    parts = gather_parts(runtime, part)
    return attempt(
        runtime, lambda: measure.conclude(parts, samples, averaged) if runtime.rank == 0 else {}
    )  # fmt: skip


@contextlib.contextmanager
def buffers_of_first(runtime: Ranks, module: nn.Module) -> Iterator[None]:
    """Collective: running statistics are each rank's own, and those that are saved are rank 0's."""
    buffers = list(module.buffers())
    if runtime.size == 1 or not buffers:
        yield
        return
    values = [buffer.detach().clone() for buffer in buffers]
    runtime.broadcast_tensors(values)
    with holding(buffers, values):
        yield
