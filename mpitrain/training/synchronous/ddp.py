"""A module under torch's DistributedDataParallel, as every run here uses it.

Invariants: all ranks share the module already, so DDP sends nothing when it is made.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpitrain.codecs.base import Codec
from mpitrain.data.read.batch import Batch
from mpitrain.errors import UsageError
from mpitrain.model.gradient.loss import BatchLoss, read_loss
from mpitrain.model.gradient.loss_pass import LossPass
from mpitrain.model.gradient.user_code import unused_parameters
from mpitrain.model.recipe import GradientRule
from mpitrain.strategies.features import UNUSED_IN_PARTS
from mpitrain.torch_versions import without_sync_of_buffers
from mpitrain.training.synchronous.codec_hooks import CodecHook, attach_codec, reattach
from mpitrain.training.watchdog.emergency import KeptBuffers


def attach(parallel: DistributedDataParallel, codec: Codec, seed: int = 0) -> CodecHook | None:
    """The hook of a codec, or None where numbers travel as they are."""
    return None if codec.is_none else attach_codec(parallel, codec, seed=seed)


def data_parallel(
    module: nn.Module, group: dist.ProcessGroup | None = None, find_unused: bool = False
) -> DistributedDataParallel:
    """DDP over `group` (default: all ranks) around a module that its ranks already share. Running statistics
    stay the validator's own: they are not used while training, so broadcasting them every step, torch's
    default, buys nothing. `find_unused`: the loss may leave parameters out."""
    off: dict[str, Any] = without_sync_of_buffers()
    return DistributedDataParallel(
        module,
        process_group=group,
        init_sync=False,
        gradient_as_bucket_view=True,
        find_unused_parameters=find_unused,
        **off,
    )


def weight_among_all(weight: float) -> float:
    """What makes the mean over all ranks of their losses' sums the sum of all over all their weights; collective, and
    every rank has to call it: all losses are weighted, or none is."""
    total = torch.tensor([weight], dtype=torch.float64)
    dist.all_reduce(total)
    return dist.get_world_size() / float(total) if total else 0.0


class ParallelModule:
    """A module under DDP that is made anew if the loss turns out to leave parameters out.

    Args:
        module: that all ranks share; codec: of the gradients, with its seed.
        find_unused: whether the loss may leave parameters out; None to find out at the first step.
    """

    def __init__(self, module: nn.Module, find_unused: bool | None, codec: Codec, seed: int):
        self.module, self.find_unused = module, find_unused
        self._named = list(module.named_parameters())
        self.ddp: DistributedDataParallel | None = self._make()
        self.hook = attach(self.ddp, codec, seed)

    def _make(self) -> DistributedDataParallel:
        return data_parallel(LossPass(self.module), find_unused=bool(self.find_unused))

    @property
    def reduces(self) -> bool:
        """Whether this step's backward pass exchanges gradients."""
        return self.ddp is not None and bool(self.ddp.require_backward_grad_sync)

    def exchange(self, whether: bool) -> None:
        """Let the backward passes to come exchange gradients, or not."""
        assert self.ddp is not None
        self.ddp.require_backward_grad_sync = whether

    def loss(self, rule: GradientRule, batch: Batch, seed: Callable[[], None]) -> BatchLoss:
        """The loss of a batch. At the first step all ranks look whether it leaves out parameters; if it does on any of
        them, DDP is made anew, which then looks at every step, and this step is done again, from a new `seed()`."""
        if self.find_unused is not None or not self.reduces:
            return self._pass(rule, batch)
        before = KeptBuffers(self.module)
        loss = self._pass(rule, batch)
        left_out = torch.tensor([len(unused_parameters(self.module, loss.total))])
        if dist.get_world_size() > 1:
            dist.all_reduce(left_out, op=dist.ReduceOp.MAX)
        self.find_unused = bool(left_out)
        if self.find_unused and rule.part_samples:
            raise UsageError(UNUSED_IN_PARTS)
        if not self.find_unused:
            return loss
        before.put_back()
        self.ddp = None
        del loss
        gc.collect()  # the hooks of the DDP before hang on the parameters for as long as it lives
        self.ddp = self._make()
        if self.hook is not None:
            reattach(self.ddp, self.hook)
        seed()
        return self._pass(rule, batch)

    def _pass(self, rule: GradientRule, batch: Batch) -> BatchLoss:
        """The loss as a forward pass of DDP, which gets ready there to exchange the gradients of this step."""
        assert self.ddp is not None
        return read_loss(self.ddp(rule.loss, batch))

    def check_all_used(self, added_up: Mapping[int, int]) -> None:
        """After the backward pass. DDP waits for ever for gradients that do not come, and reports it at the next step
        only, if there is one. `added_up`: where the gradients of the step's batches before were in memory, by
        parameter; one that is there still has not been exchanged.

        Raises:
            UsageError: the loss has left out parameters.
        """
        if self.find_unused or not self.reduces:
            return
        left_out = [
            name
            for name, one in self._named
            if one.requires_grad
            and (one.grad is None or (id(one) in added_up and one.grad.data_ptr() == added_up[id(one)]))
        ]
        if left_out and added_up:
            raise UsageError(UNUSED_IN_PARTS)
        if left_out:
            more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
            raise UsageError(
                f"the loss does not depend on {', '.join(left_out[:3])}{more} in this step, and allreduce() needs the "
                "gradient of every parameter; say Job(find_unused_parameters=True)"
            )
