"""How a batch becomes a gradient, and how a gradient becomes an update: two values that a job is made into once, and
that every family is handed whole.

    loss, backward, own clipping and noise                  `GradientRule`, on each worker
    rates, mean clipping and noise, step, moving average    `UpdateRule`, on whoever holds the parameters

Invariants: both values are frozen, and no number of them is handed on by itself. What has a memory (loss scale, ticks,
averages) is what they `begin`. Only gradients whose numbers are all finite are shaped. What a family does differently
(exchanges, slices, wires) is its own affair; what a job asks of any gradient or of any update stands here alone.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from mpitrain.data.read.batch import Batch, to_device
from mpitrain.devices import accelerator, draws
from mpitrain.messages import Lease
from mpitrain.model.gradient.accumulation import LeaseReader, MeanLoss, backward_in_parts
from mpitrain.model.gradient.clipping import NO_CLIPPING, Clipping
from mpitrain.model.gradient.loss import BatchLoss, read_loss
from mpitrain.model.gradient.precision import backward_scaled, loss_scale
from mpitrain.model.optimizers.ema import ema_of
from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.model.optimizers.torch_scheduler import TorchSchedule
from mpitrain.model.wire.flat import FlatModel, all_finite
from mpitrain.strategies.schedules import Pace, Schedule
from mpitrain.strategies.ticks import Law, Ticks
from mpitrain.system.draws import LOCK

Loss = Callable[[Any, Batch], Any]


def brought_by_loop(*arguments: Any) -> Any:
    """Stands for the loss and the data of a loop of the user's own, for which nobody else asks."""
    raise AssertionError("the loop, its loss and its data are the user's own")


def seed_step(seed: int, worker: int, step: int, part: int = 0) -> None:
    """Seed torch for one step of one worker, or for one batch of several that it takes the step with."""
    number = _number(f"{seed}/{worker}/{step}" + (f"/{part}" if part else ""))
    with LOCK:
        if not accelerator.is_begun() and accelerator.kind() is not None:
            torch.manual_seed(number)
            return
        # the same, without a note of the call stack for every kind of device that may yet come: a millisecond
        torch.default_generator.manual_seed(number)
        draws.seed_devices(number)


def _number(key: str) -> int:
    """What a generator is seeded with for this key."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class Noise:
    """What `Job(gradient_noise=)` asks for; false where that is nothing.

    It is Gaussian, of the same deviation in every step: Neelakantan et al. 2015, "Adding gradient noise improves
    learning for very deep networks", arXiv:1511.06807, let it decay. It is drawn on the host, so that a device changes
    no draw, and of a sparse gradient for the rows that are there.

    Args:
        deviation: standard deviation of what is added to every number; seed: the job's.
    """

    deviation: float = 0.0
    seed: int = 0

    def __bool__(self) -> bool:
        return self.deviation > 0

    @torch.no_grad()
    def add(self, gradient: list[torch.Tensor], keys: Sequence[str], scale: float = 1.0) -> None:
        """Add it in place.

        Args:
            keys: of the draw for each of these tensors, besides its number.
            scale: by which the gradient has been multiplied already.
        """
        for number, (one, key) in enumerate(zip(gradient, keys, strict=True)):
            generator = torch.Generator().manual_seed(_number(f"noise/{self.seed}/{key}/{number}"))
            drawn = torch.randn(one.shape, generator=generator, dtype=one.dtype)
            one.add_(drawn.to(one.device), alpha=self.deviation * scale)


NO_NOISE = Noise()


@dataclass(frozen=True)
class GradientRule:
    """How a worker's batch becomes its gradient.

    Args:
        loss: `loss(module, batch)` as in `Job`; seed: key of the randomness.
        precision: in which the loss is computed.
        part_samples: that are computed at once, where a lease is more than one batch; 0: a lease is one.
        clipping, noise: of each worker's own gradient.
        step: the job's step function in place of a loss, where it has one.
    """

    loss: Loss = brought_by_loop
    seed: int = 0
    precision: str = "float32"
    part_samples: int = 0
    clipping: Clipping = NO_CLIPPING
    noise: Noise = NO_NOISE
    step: Callable[[Any, Any, Batch], Any] | None = None

    @functools.cached_property  # asked at every batch
    def shapes(self) -> bool:
        """Whether a gradient is changed before anybody else sees it."""
        return bool(self.clipping or self.noise)

    def begin(self, worker: int) -> Gradients:
        """The gradients of one worker; its number is the key of its randomness, whatever its rank is."""
        return Gradients(self, worker)


class Gradients:
    """One worker's gradients, from batch to batch."""

    def __init__(self, rule: GradientRule, worker: int):
        self.rule, self.worker, self.step = rule, worker, 0
        self.scale = loss_scale(rule.precision)

    def seed(self, step: int, part: int = 0) -> None:
        """Seed torch for this step, or for one batch of several that it is taken with."""
        self.step = step
        seed_step(self.rule.seed, self.worker, step, part)

    def backward(
        self, model: FlatModel, reader: LeaseReader, lease: Lease, step: int, weight: float = 1.0
    ) -> MeanLoss:
        """Forward and backward over the batches of a lease, in training mode; leaves the gradient of `weight` times
        their mean loss on the parameters, shaped."""

        def loss_of(batch: Batch) -> BatchLoss:
            on_device = to_device(batch, model.device)
            with model.in_place.around():
                return read_loss(self.rule.loss(model.module, on_device))

        def backward(factor: float) -> MeanLoss:
            parts = reader.read(lease)
            seed = functools.partial(self.seed, step)
            return backward_in_parts(parts, lease.num_samples, loss_of, seed, model.owners(), factor * weight)

        model.module.train()
        for parameter in (*model.parameters, *model.reduced):
            parameter.grad = None
        mean = backward_scaled(self.scale, model.module, backward, model.gradients)
        if self.rule.shapes:
            self.shape([one.grad for one in model.owners() if one.grad is not None])
        return mean

    def shape(self, gradient: list[torch.Tensor], number: int = 0) -> None:
        """Make the gradient of the step that was seeded last what others are to see, in place, if it is finite;
        `number`: of several that a step has."""
        if self.rule.shapes and all_finite(gradient):
            self.rule.clipping.clip(gradient)
            if self.rule.noise:
                key = f"worker {self.worker}/{self.step}" + (f"/{number}" if number else "")
                self.rule.noise.add(gradient, [key] * len(gradient))


@dataclass(frozen=True)
class UpdateRule:
    """How a gradient becomes an update of the parameters.

    Args:
        clipping, noise: of the gradient that is stepped with: the mean of all workers', where they are averaged.
        schedule: factor on the rates; scheduler: the job's, which makes a torch scheduler in its place.
        ema: decay of the moving average of the parameters; None for none.
        on_nonfinite: "stop" at a gradient that is not finite, or "skip" it.
        epoch_samples: in an epoch; 0 around a loop of the user's own, who sets the rates.
        law: what a step of all is: samples of a worker's, workers, and the least that counts as one.
        metric: of the validations, which a scheduler may go by; empty without any.
    """

    clipping: Clipping = NO_CLIPPING
    schedule: Schedule | None = None
    scheduler: Callable[[Optimizer], Any] | None = None
    ema: float | None = None
    on_nonfinite: str = "stop"
    epoch_samples: int = 0
    law: Law = Law(1, 1)
    noise: Noise = NO_NOISE
    metric: str = ""

    @functools.cached_property  # asked at every update
    def shapes(self) -> bool:
        """Whether a gradient is changed before it is stepped with."""
        return bool(self.clipping or self.noise)

    def pace(self, rates: Rates) -> Pace:
        """What the rates follow; `rates`: of the job's optimizer, as it began.

        Raises:
            UsageError: the job's `scheduler` makes none.
        """
        if not self.epoch_samples:
            return Pace()
        ticks = Ticks(self.epoch_samples, self.law)
        if self.scheduler is None:
            return Pace(self.schedule, ticks)
        return Pace(TorchSchedule(self.scheduler, rates, ticks, self.metric), ticks)

    def begin(
        self, rates: Rates | None, held: Callable[[], Sequence[torch.Tensor]], pace: Pace | None = None
    ) -> Updates:
        """The updates of whoever holds these tensors.

        Args:
            rates: of the optimizer that steps them, if one does; held: where their numbers lie.
            pace: what the rates follow, where another optimizer is the job's.
        """
        if pace is None:
            pace = self.pace(rates) if rates is not None else Pace()
        return Updates(self, rates, held, pace)


class Updates:
    """The updates of one holder of parameters."""

    def __init__(
        self, rule: UpdateRule, rates: Rates | None, held: Callable[[], Sequence[torch.Tensor]], pace: Pace
    ):
        self.rule, self.rates, self.pace, self.key = rule, rates, pace, (0, 0)
        self._num_shaped = 0  # gradients of the update under way: of each of several optimizers one
        self.ema = ema_of(rule.ema, held)

    def follow(self, samples: int, num_workers: int, part: int = -1) -> None:
        """The update to come is the one after so many accepted samples, with so many workers: the rates follow. `part`:
        which parameters are held here, where others hold others, such as the shard of a server, -1: those that all hold
        beside them; with the samples the key of what is drawn for it."""
        self.key, self._num_shaped = (samples, part), 0
        factor = self.pace.factor(samples, num_workers)
        if factor is not None and self.rates is not None:
            self.rates.set(factor)

    def shape(
        self,
        gradient: Callable[[], list[torch.Tensor]],
        scale: float = 1.0,
        total: torch.Tensor | None = None,
        parts: Callable[[], list[int]] | None = None,
    ) -> None:
        """Make a finite gradient what is stepped with, in place; `scale`, `total`: as for `Clipping.clip`. `parts`: of
        each tensor, which part it is, where some are held whole and some in slices; by default that of `follow`."""
        if not self.rule.shapes:
            return
        found, (samples, part) = gradient(), self.key
        self.rule.clipping.clip(found, scale, total)
        if self.rule.noise and scale:
            each = [part] * len(found) if parts is None else parts()
            self.rule.noise.add(found, [f"{samples}/{self._num_shaped}/{one}" for one in each], scale)
        self._num_shaped += 1

    def moved(self) -> None:
        """The parameters have been updated."""
        if self.ema is not None:
            self.ema.update()


class Recipe(NamedTuple):
    """Both; by default those around a loop of the user's own, who computes gradients and sets rates."""

    gradient: GradientRule = GradientRule()
    update: UpdateRule = UpdateRule()
