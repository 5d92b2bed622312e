"""Gradients of a wrapped loop, averaged over all ranks by torch's DDP, whatever the loop has called of the model.

Nobody hands us the loss of such a loop. Its forward pass, its methods, single layers or weights: all end in gradients
of the model's parameters, so the backward pass itself makes DDP ready when it reaches the first of them.

Invariants: the model is the user's own, with hooks on its parameters; DDP wraps a `LossPass` and is called from those
hooks alone. A backward pass is one exchange, so ranks go backward equally often. What a pass leaves out is found in its
graph: on all ranks together at the first exchange, and where nothing was left out then, by its absence at a step.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mpitrain.codecs.base import Codec
from mpitrain.codecs.none import Uncompressed
from mpitrain.errors import UsageError
from mpitrain.model.gradient.loss_pass import LossPass, name_itself
from mpitrain.torch_versions import will_be_reached
from mpitrain.training.synchronous.codec_hooks import reattach
from mpitrain.training.synchronous.ddp import attach, data_parallel
from mpitrain.wrapping.same_samples import SameSamples

_EXCHANGES: weakref.WeakKeyDictionary[nn.Module, Exchange] = weakref.WeakKeyDictionary()


class Exchange:
    """Of one model, among all ranks.

    Args:
        model: which all ranks share; codec: of the gradients.
        find_unused: whether backward passes may leave parameters out; None to find out at the first exchange.
    """

    def __init__(self, model: nn.Module, codec: Codec | None = None, find_unused: bool | None = None):
        self.model, self.find_unused = model, find_unused
        self.parallel: Any = data_parallel(LossPass(model), find_unused=bool(find_unused))
        self.hook = attach(self.parallel, codec or Uncompressed())
        trained = ((name, one) for name, one in model.named_parameters() if one.requires_grad)
        self._trained = [
            (name, one, torch.autograd.graph.get_gradient_edge(one).node) for name, one in trained
        ]
        self._awaited: set[int] = set()  # parameters that the exchange under way has not reached
        self._same = SameSamples(1 if self.hook else dist.get_world_size())
        self._hooks = [
            node.register_prehook(functools.partial(self._reach, number))
            for number, (*_, node) in enumerate(self._trained)
        ]
        _EXCHANGES[model] = self

    def end(self) -> None:
        """From here on backward passes are this rank's own."""
        for hook in self._hooks:
            hook.remove()
        self.parallel = None
        gc.collect()  # DDP's own hooks hang on the parameters for as long as it lives
        _EXCHANGES.pop(self.model, None)

    def turn(self, on: bool) -> None:
        """Let the backward passes to come exchange gradients, or not."""
        self.parallel.require_backward_grad_sync = on

    def check_whole(self) -> None:
        """Before a step.

        Raises:
            UsageError: the backward passes since the last exchange have left out parameters.
        """
        if not self._awaited:
            if self._same.looks:
                self._same.tell(dist.get_rank())
            return
        names = [self._trained[number][0] for number in sorted(self._awaited)]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise UsageError(
            f"the loss does not depend on {', '.join(names[:3])}{more} in this step, and gradients are averaged when "
            "all are there: say mpitrain.wrap(..., find_unused_parameters=True), or freeze what is not trained "
            "(requires_grad_(False)) before mpitrain.wrap"
        )

    def _reach(self, number: int, gradients: Any) -> None:
        """The backward pass is about to add to the gradient of this parameter."""
        if not self.parallel.require_backward_grad_sync:
            return
        if self._same.looks:
            self._same.see(self._trained[number][1], gradients[0])
        if not self._awaited:
            self._begin()
        elif number not in self._awaited:
            self._check_recomputed(number)
            self.check_whole()
        self._awaited.discard(number)

    def _check_recomputed(self, number: int) -> None:
        """What a pass leaves out is found in its graph, which does not hold what is made in the pass itself."""
        if self.find_unused:
            raise UsageError(
                f"{self._trained[number][0]} is of a part that torch.utils.checkpoint(use_reentrant=True) computes "
                "anew in the backward pass, where nobody can foresee which gradients come: say use_reentrant=False, "
                "or, if no step leaves parameters out, mpitrain.wrap(..., find_unused_parameters=False)"
            )

    def _begin(self) -> None:
        everything = range(len(self._trained))
        reached = {n for n in everything if will_be_reached(self._trained[n][2])}
        if self.find_unused is None:
            left_out = torch.tensor([len(reached) < len(everything)], dtype=torch.int64)
            if dist.get_world_size() > 1:
                dist.all_reduce(left_out, op=dist.ReduceOp.MAX)
            self.find_unused = bool(left_out)
            if self.find_unused:
                self._make_anew()
        self._awaited = reached if self.find_unused else set(everything)
        shown = [self._trained[number][1] for number in reached] if self.find_unused else []
        with torch.enable_grad():
            self.parallel(_views, shown)

    def _make_anew(self) -> None:
        """With a DDP that looks at every step for what is left out."""
        self.parallel = None
        gc.collect()  # the hooks of the DDP before hang on the parameters for as long as it lives
        self.parallel = data_parallel(LossPass(self.model), find_unused=True)
        if self.hook is not None:
            reattach(self.parallel, self.hook)


def _views(model: nn.Module, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """What DDP follows from a forward pass back to the parameters that it has used."""
    return [one.view_as(one) for one in parameters]


def end_exchanges() -> None:
    """Of all models of this process."""
    for exchange in list(_EXCHANGES.values()):
        exchange.end()


def answer_as_ddp(model: nn.Module) -> None:
    """Let the model answer to what programs for torch's DDP ask: `model.module` is itself, and `model.no_sync()` is
    there under every strategy. An attribute of such a name of its own stays."""
    name_itself(model)
    if isinstance(model, nn.Module) and not hasattr(model, "no_sync"):
        vars(model)["no_sync"] = functools.partial(no_sync, model)


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward passes in here add up this rank's own gradients; where the strategy averages them, the next pass after
    that averages the sums."""
    exchange = _EXCHANGES.get(model)
    if exchange is None:
        yield
        return
    before = exchange.parallel.require_backward_grad_sync
    exchange.turn(False)
    try:
        yield
    finally:
        exchange.turn(before)
