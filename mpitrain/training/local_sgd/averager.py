"""Averaging what the workers hold, when the strategy says so: parameters, optimizer state, buffers.

Invariants: all ranks call the same in the same order, because the strategy decides by counts alone. Every rank leaves
an averaging with the same parameters, to the bit. What an averaging needs of the other ranks it asks for (`Ask`): over
MPI each question is a collective, and in a simulation one process answers the questions of all ranks at once.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from mpitrain.effects import drive
from mpitrain.model.copies import copied
from mpitrain.model.in_place import held_alike
from mpitrain.model.optimizers.outer_optimizer import OuterOptimizer
from mpitrain.model.pieces import PIECE_BYTES, cut
from mpitrain.model.wire.flat import trainable
from mpitrain.strategies.local_sgd import LocalSGD
from mpitrain.training.local_sgd.means import Means
from mpitrain.training.synchronous.collectives import GroupCollectives
from mpitrain.training.validations.validation import Part


class Ask(NamedTuple):
    """A question to all ranks, answered with the mean of everybody's `tensors` (unrounded where `full`), or, where
    there are `numbers`, with everybody's, one row a rank. `counted`: its bytes are those of an averaging; `piece`: of
    the parameters, by number, where there are several. `first`: not the mean, but the first rank's tensors. `part`: of
    a validation; answered, on the first rank, with everybody's."""

    tensors: list[torch.Tensor] = []
    full: bool = False
    counted: bool = True
    piece: int | None = None
    numbers: tuple[int, ...] = ()
    first: bool = False
    part: Part | None = None


Asking = Generator[Ask, Any, Any]


class MeansElsewhere(Protocol):
    """What an averager knows of means that are taken for all ranks at once, not by itself: this rank's counts."""

    sent_bytes: float
    codec_s: float

    def state(self) -> dict[str, Any]:
        """What has been rounded off and not been sent yet."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""


class Averager:
    """The workers' parameters between two averagings, on one rank.

    Args:
        module, optimizer: the worker's own.
        strategy: when and how to average.
        means: what takes means and counts bytes; by default over `collectives`.
        collectives: of the workers, by default all ranks.
    """

    piece_bytes = PIECE_BYTES  # of what is averaged at once

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        strategy: LocalSGD,
        means: Means | MeansElsewhere | None = None,
        collectives: GroupCollectives | None = None,
    ):
        self.module, self.optimizer, self.strategy = module, optimizer, strategy
        if means is None:
            self.collectives = collectives or GroupCollectives()
            means = Means(strategy.wire, self.collectives)
        entries = trainable(module, optimizer)
        self.parameters: list[torch.Tensor] = [parameter for _, parameter, _ in entries]
        self._groups = [index for _, _, index in entries]
        self.memory = strategy.begin()
        self.outer = OuterOptimizer(strategy.outer)
        self.means: Means | MeansElsewhere = means
        self.num_averagings, self.drift = 0, 0.0
        self._anchor: list[torch.Tensor] = []

    @property
    def averages_gradients(self) -> bool:
        """Whether the step to come is one of allreduce."""
        return self.strategy.averages_gradients(self.memory)

    @property
    def is_apart(self) -> bool:
        """Whether workers may hold different parameters now."""
        return bool(self.memory["since"])

    def held_alike(self) -> list[tuple[str, torch.Tensor]]:
        """What all workers hold the same of after an averaging."""
        averaged = {id(one) for one in self.parameters}
        if self.strategy.average_buffers:
            averaged |= {id(one) for one in floating(self.module.buffers())}
        return [(name, one) for name, one in held_alike(self.module) if id(one) in averaged]

    def begin_step(self) -> None:
        """Before the first local step of a round: remember what all hold."""
        if self.strategy.keeps_anchor and not self._anchor and not self.averages_gradients:
            self._anchor = [parameter.detach().clone() for parameter in self.parameters]

    def end_step(self, samples: int = 1) -> bool:
        """A step of all workers over `samples` samples was taken: whether `average` is due."""
        return self.strategy.on_step(self.memory, samples)

    def gather_numbers(self, *numbers: int) -> torch.Tensor:
        """Everybody's `numbers`, one row a rank."""
        return torch.stack(self.collectives.everybody(torch.tensor(numbers, dtype=torch.int64)))

    def average(self) -> None:
        """All workers take the mean of what they hold, and the outer step from there."""
        drive(self.rounds(), self.reduce)

    @torch.no_grad()
    def reduce(self, ask: Ask) -> Any:
        """Answer a question by a collective of the workers."""
        if ask.numbers:
            return self.gather_numbers(*ask.numbers)
        if ask.first:
            return self.collectives.from_first(ask.tensors)
        assert isinstance(self.means, Means)
        return self.means.means_of(ask.tensors, ask.full, ask.counted, ask.piece)

    @torch.no_grad()
    def rounds(self) -> Asking:
        """`average`, with its questions left to whoever runs it."""
        rates = [float(self.optimizer.param_groups[index]["lr"]) for index in self._groups]
        self.outer.begin(self.parameters, rates)
        apart, size = 0.0, 0.0  # squares of distances and of means
        pieces = cut(self.parameters, self.piece_bytes)
        for number, piece in enumerate(pieces):
            own, anchor = piece.of(self.parameters), piece.of(self._anchor) if self._anchor else []
            means, differences = yield from self._mean_and_difference(
                number if len(pieces) > 1 else None, own, anchor
            )
            size += _squares(means)
            apart += _squares(torch._foreach_sub(own, means))
            self.outer.move(piece, means, differences)
            torch._foreach_copy_(own, means)
            if anchor:
                torch._foreach_copy_(anchor, own)
        self.drift = math.sqrt(apart / size) if size else 0.0
        if self.strategy.average_buffers:
            yield from self._into(floating(self.module.buffers()))
        if self.strategy.average_optimizer:
            yield from self._average_optimizer()
        self.strategy.on_average(self.memory)
        self.num_averagings += 1

    def _mean_and_difference(
        self, number: int | None, own: list[torch.Tensor], anchor: list[torch.Tensor]
    ) -> Asking:
        """Of the piece of that number: xbar, and x0 - xbar where there is an outer step or a wire."""
        if self.strategy.wire == "full":
            means = yield Ask(own)
            return means, list(torch._foreach_sub(anchor, means)) if anchor else []
        differences = yield Ask(list(torch._foreach_sub(anchor, own)), piece=number)
        return list(torch._foreach_sub(anchor, differences)), differences

    def _into(self, tensors: list[torch.Tensor]) -> Asking:
        for piece in cut(tensors, self.piece_bytes):
            part = piece.of(tensors)
            torch._foreach_copy_(part, (yield Ask(part, full=True)))

    def _average_optimizer(self) -> Asking:
        """A worker that has not stepped yet has no momenta; then none are averaged this time."""
        tensors = self._momenta()
        rows = yield Ask(numbers=(sum(tensor.numel() for tensor in tensors), len(tensors)))
        if bool((rows == rows[0]).all()):
            yield from self._into(tensors)

    def _momenta(self) -> list[torch.Tensor]:
        return [
            value
            for parameter in self.parameters
            for _, value in sorted(self.optimizer.state.get(parameter, {}).items())
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        ]

    def num_bytes(self) -> float:
        """Bytes that an averaging reduces, before they are divided among ranks: parameters in the wire's width, the
        rest in full."""
        others = floating(self.module.buffers()) if self.strategy.average_buffers else []
        others += self._momenta() if self.strategy.average_optimizer else []
        wide = sum(tensor.numel() * tensor.element_size() for tensor in others)
        numbers = sum(parameter.numel() for parameter in self.parameters)
        full = self.parameters[0].element_size()
        return wide + numbers * {"full": full, "int8": 65 / 64}.get(self.strategy.wire, 2)

    def statistics(self) -> dict[str, float]:
        """Of the run so far: averagings, this rank's bytes for them, milliseconds an averaging spent rounding, and
        how far its parameters were from the mean at the last one, relative to the mean.
        """
        count = max(1, self.num_averagings)
        return {
            "averagings": self.num_averagings, "averaging_bytes": self.means.sent_bytes,
            "codec_ms": 1e3 * self.means.codec_s / count, "drift": self.drift,
        }  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Counts, x0, velocities and what the wire has rounded off; copies."""
        return {
            "memory": dict(self.memory), "anchor": copied(self._anchor), "outer": self.outer.state(),
            "means": self.means.state(),
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned; parameters and the optimizer's state are the caller's."""
        self.memory = dict(state["memory"])
        outer = state["outer"]
        self._anchor = self._placed(state["anchor"])
        self.outer.restore({**outer, "velocity": self._placed(outer["velocity"])})
        self.means.restore(state["means"])

    def _placed(self, saved: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of a tensor for each parameter, or of none, where the parameters lie: a checkpoint is read into host
        memory."""
        return [tensor.to(own.device, copy=True) for tensor, own in zip(saved, self.parameters, strict=False)]


def floating(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of floating dtype."""
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def _squares(tensors: Sequence[torch.Tensor]) -> float:
    """The square of the Euclidean norm over all tensors."""
    return float(torch.stack(torch._foreach_norm(list(tensors))).double().square().sum())
