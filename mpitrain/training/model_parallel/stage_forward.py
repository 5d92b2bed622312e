"""Forward passes through the stages of one pipeline, outside any schedule: for validation, and to learn the shapes
that a schedule has to know beforehand.

Invariants: each message of tensors goes after a header of fixed length that holds their dtypes and shapes, so
any batch can follow any other. Stages do not wait for each other: while one validates a batch, the one before it is
at the next.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mpitrain.devices import draws
from mpitrain.errors import UsageError

HEADER_BYTES = 2048
Tensors = tuple[torch.Tensor, ...]


class StageForward:
    """The forward passes of one stage.

    Args:
        module: the stage; group: the ranks of the pipeline in the order of their stages; device: of the stage.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, device: torch.device):
        self.module, self.group, self.device = module, group, device
        self.stage, self.num_stages = dist.get_rank(group), dist.get_world_size(group)
        self._sent: list[tuple[Any, torch.Tensor]] = []

    def forward(self, inputs: Tensors | None) -> tuple[Tensors, Any]:
        """Run the stage once; `inputs` on the first stage, None elsewhere. Returns (inputs, output) of this stage."""
        taken = self._receive() if inputs is None else inputs
        output = self.module(*taken)
        if self.stage + 1 < self.num_stages:
            self._send(as_tuple(output))
        return taken, output

    def learn_shapes(self, inputs: Tensors | None) -> tuple[Tensors, Tensors]:
        """Inputs and outputs of this stage for such a microbatch, as tensors that hold nothing. Leaves no trace in
        random numbers or buffers.
        """
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        with draws.forked_draws(self.device), torch.enable_grad():
            taken, output = self.forward(inputs)
        self.finish()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        return _empty(taken), _empty(as_tuple(output))

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _send(self, tensors: Tensors) -> None:
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        description = [[str(t.dtype).removeprefix("torch."), t.requires_grad, list(t.shape)] for t in tensors]
        text = json.dumps(description).encode()
        if len(text) > HEADER_BYTES:
            raise UsageError(
                f"stage {self.stage} returns {len(tensors)} tensors, too many to pass on; return fewer"
            )
        header = torch.tensor(list(text.ljust(HEADER_BYTES)), dtype=torch.uint8, device=self.device)
        for tensor in (header, *(t.detach().contiguous() for t in tensors)):
            work = dist.isend(tensor, group=self.group, group_dst=self.stage + 1)
            self._sent.append((work, tensor))

    def _receive(self) -> Tensors:
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self.device)
        dist.recv(header, group=self.group, group_src=self.stage - 1)
        tensors = []
        for dtype, requires_grad, shape in json.loads(bytes(header.tolist())):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            dist.recv(tensor, group=self.group, group_src=self.stage - 1)
            tensors.append(tensor.requires_grad_(requires_grad and torch.is_grad_enabled()))
        return tuple(tensors)


def as_tuple(output: object) -> Tensors:
    """A stage's output as the next stage gets it.

    Raises:
        UsageError: it is neither a tensor nor a tuple of tensors.
    """
    tensors = tuple(output) if isinstance(output, list | tuple) else (output,)
    if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        kinds = ", ".join(type(tensor).__name__ for tensor in tensors) or "nothing"
        raise UsageError(f"a stage must return a tensor or a tuple of tensors, got {kinds}")
    return tensors


def _empty(tensors: Tensors) -> Tensors:
    return tuple(torch.empty_like(tensor).requires_grad_(tensor.requires_grad) for tensor in tensors)
