"""A server's shard: a slice of the flat vector with the optimizer state that belongs to it.

Law of this file: whoever was given a version keeps exactly that version. The live frame is sent without
copying; when an update comes while somebody still holds it, the update goes into a fresh frame and the old
one stays as it was (copy on write). Gradients are used where they arrived.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mpitrain.model.flat import Layout
from mpitrain.model.frame import Frame, FramePool
from mpitrain.model.optimizer import check_elementwise, rebuild


class ShardStore:
    """One shard.

    Args:
        layout: of the whole vector; shard: which part of it.
        initial: 1-D tensor of the shard's first parameters; copied.
        prototype: the user's optimizer; its class and group options are used, its own parameters are not
            touched.
    """

    def __init__(self, layout: Layout, shard: int, initial: torch.Tensor, prototype: Optimizer):
        check_elementwise(prototype)
        self.pool = FramePool(layout.size(shard), layout.dtype)
        self.live = self.pool.take()
        self.live.body.copy_(initial)
        self._slices = [(start, stop) for _, start, stop in layout.group_slices(shard)]
        self._parameters = [nn.Parameter(self.live.body[start:stop]) for start, stop in self._slices]
        groups = [group for group, _, _ in layout.group_slices(shard)]
        self.optimizer = rebuild(prototype, list(zip(groups, self._parameters, strict=True)))
        self._gathered: Frame | None = None

    def frame(self) -> Frame:
        """An empty frame for an arriving gradient."""
        return self.pool.take()

    def add(self, payload: Any, weight: float) -> None:
        """Gather `weight * gradient`; takes the frame over and releases it when it is done with it."""
        if self._gathered is None:
            self._gathered = payload
            if weight != 1.0:
                payload.body.mul_(weight)
            return
        self._gathered.body.add_(payload.body, alpha=weight)
        payload.release()

    def apply(self) -> None:
        """One optimizer step with what was gathered."""
        gathered = self._gathered
        assert gathered is not None, "apply without a gradient"
        if self.live.users > 1:
            self._move_to(self.pool.take())
        for parameter, (start, stop) in zip(self._parameters, self._slices, strict=True):
            parameter.grad = gathered.body[start:stop]
        self.optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        self._gathered = None
        gathered.release()

    def _move_to(self, fresh: Frame) -> None:
        fresh.body.copy_(self.live.body)
        for parameter, (start, stop) in zip(self._parameters, self._slices, strict=True):
            parameter.data = fresh.body[start:stop]
        self.live.release()
        self.live = fresh

    def read(self) -> Frame:
        """The present parameters; held for the caller, who releases them."""
        return self.live.hold()

    def state(self) -> dict[str, Any]:
        """Parameters and optimizer state; tensors are copies."""
        assert self._gathered is None, "state is taken between updates"
        copied = torch.utils._pytree.tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, self.optimizer.state_dict()
        )
        return {"parameters": self.live.body.clone(), "optimizer": copied}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        if self.live.users > 1:
            self._move_to(self.pool.take())
        self.live.body.copy_(state["parameters"])
        self.optimizer.load_state_dict(state["optimizer"])
