"""The step that all ranks of a synchronous run take together, whatever family the run is of.

Invariants: every rank calls the same collectives in the same order. Random numbers are seeded by (seed, rank, step)
before the forward pass. A loss that is not finite poisons the gradient, and a gradient that is not finite moves
nothing.

What the families do differently are hooks:

    exchange           DDP and FSDP2 exchange gradients in a step's last backward pass only
    forward            allreduce and local SGD call the module, or DDP; a pipeline replaces all of `backward`
    weigh, weight_of_sums    the mean over ranks by samples, or by the weights that the loss returns (collective)
    clip               split models add up the norms of their parts; a codec's hook has clipped each rank's already
    judge              each rank reads it off the same reduced gradient; split models agree on it (collective)
    step_optimizer     whole matrices for Muon over slices
    on_nonfinite       counted at once; under local SGD at the next averaging
    before_forward, before_update    injected delays, and the guard of emergency checkpoints; nothing in virtual time
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext

import torch
from torch import nn

from mpitrain.data.read.batch import Batch
from mpitrain.effects import Exchange
from mpitrain.job import Job
from mpitrain.model.gradient.accumulation import MeanLoss, scale_gradients
from mpitrain.model.gradient.loss import BatchLoss, read_loss
from mpitrain.model.gradient.precision import backward_scaled
from mpitrain.model.gradient.sparse_gradients import explained_tables, numbers_of_gradients
from mpitrain.model.gradient.sync_batchnorm import count_batch
from mpitrain.model.in_place import InPlaceGuard
from mpitrain.model.optimizers.ema import Averaged
from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.model.optimizers.step_hooks import OwnStep
from mpitrain.model.recipe import Recipe
from mpitrain.model.wire.flat import all_finite, trainable
from mpitrain.system import trace
from mpitrain.training.synchronous.ddp import ParallelModule, weight_among_all

Parts = Iterable[tuple[Batch | None, int]]  # a step's batches, with their samples


class Stepper:
    """Takes one rank's steps and counts them.

    Args:
        job: what is trained; recipe: how its batches become updates, of as many workers as there are shares.
        random_key: ranks with the same key draw the same random numbers.
        where: names this rank and its step in a failure; by default the rank is `random_key`.

    Attributes:
        step, samples, nonfinite: steps taken, samples accepted and steps refused.
        failure: why the run has to stop, or "".
        compute_s: seconds in forward and backward passes.
        parallel: the DDP around the module, where there is one.
    """

    module: nn.Module
    rates: Rates
    optimizer: torch.optim.Optimizer
    own_step: OwnStep
    parallel: ParallelModule | None = None
    rescales_first = True  # whether gradients that were added up can be scaled before the last backward pass

    def __init__(
        self,
        job: Job,
        recipe: Recipe,
        random_key: int,
        where: Callable[[], str] | None = None,
    ):
        self.job, self.recipe, self.num_replicas = job, recipe, recipe.update.law.num_workers
        self.where = where or self._where
        self.step = self.samples = self.nonfinite = 0
        self.compute_s, self.failure = 0.0, ""
        self._part, self._waited_s = 0, 0.0
        self.own_gradients, self.loss_factor = recipe.gradient.begin(random_key), 1.0
        self.before_forward: Callable[[], None] = _nothing
        self.before_update: Callable[[], None] = _nothing
        if trace.is_on():
            self.go_back = self._go_back_traced  # type: ignore[method-assign]
        trace.watch(
            self, compute=("gradient", trace.COMPUTE), forward=("forward", trace.COMPUTE),
            judge=("is it finite", trace.OTHER), use_gradient=("optimizer", trace.OPTIMIZER),
        )  # fmt: skip

    def train(self, module: nn.Module, rates: Rates, parallel: ParallelModule | None = None) -> None:
        """Step this module with the optimizer of `rates`."""
        self.module, self.rates, self.optimizer, self.parallel = module, rates, rates.optimizer, parallel
        self.own_step = OwnStep(self.optimizer)
        self._trainable = [parameter for _, parameter, _ in trainable(module, self.optimizer)]
        self.in_place = InPlaceGuard([*module.named_parameters()], "")
        self.updates = self.recipe.update.begin(rates, lambda: self._trainable)
        if parallel is not None and parallel.hook is not None:
            parallel.hook.own_gradients = self.own_gradients

    def take_step(self, parts: Parts, share: int, count: int) -> float:
        """One step on this rank's `share` samples of the `count` of all ranks; returns the loss to report."""
        value = self.compute(parts, share, count)
        return self.update(value, share, count)

    def reduce_gradients(self) -> Exchange | None:
        """What is still to be exchanged, and done, after `take_step`; None: its backward pass has exchanged all."""
        return None

    def compute(self, parts: Parts, share: int, count: int) -> float:
        """The first half: forward and backward. Returns this rank's loss."""
        arriving = self._awaited(iter(parts))
        first = next(arriving)
        self._part = 0
        self.seed()
        self.optimizer.zero_grad(set_to_none=True)
        began_s, waited_s = time.monotonic(), self._waited_s
        self.before_forward()
        value = self._backward_scaled(
            itertools.chain([first], arriving), share, share * self.num_replicas / count
        )
        self.compute_s += time.monotonic() - began_s - (self._waited_s - waited_s)
        return value

    def _backward_scaled(self, parts: Parts, share: int, weight: float) -> float:
        """`backward`, done again with a smaller scale where float16 overflows."""
        if self.own_gradients.scale is None:
            return self.backward(parts, share, weight)
        kept = list(parts)

        def backward(factor: float) -> float:
            self.loss_factor, self._part = factor, 0
            self.seed()
            return self.backward(kept, share, weight)

        return backward_scaled(
            self.own_gradients.scale, self.module, backward, self.gradients, self.is_finite
        )

    def is_finite(self, gradients: list[torch.Tensor]) -> bool:
        """Whether the gradients under a loss scale are finite; the same on all ranks that exchange them."""
        return all_finite(gradients)

    def _awaited(self, parts: Iterator[tuple[Batch | None, int]]) -> Iterator[tuple[Batch | None, int]]:
        """The same, with what is waited for them counted."""
        while True:
            began_s = time.monotonic()
            part = next(parts, None)
            self._waited_s += time.monotonic() - began_s
            if part is None:
                return
            yield part

    def update(self, value: float, share: int, count: int) -> float:
        """The second half: use the gradient, if it is finite. Returns the loss to report."""
        loss, finite = self.judge(value, share / count)
        self.before_update()
        if finite:
            self.use_gradient()
            self.samples += count
        else:
            self.on_nonfinite(value, count)
        self.step += 1
        return loss

    def use_gradient(self) -> None:
        """Step with the gradient, which is finite."""
        self.follow_schedule()
        self.clip()
        self.step_optimizer()
        self.update_ema()

    def begin_anew(self) -> None:
        """The steps since a place in the run are taken again, and what ended the run in them has not happened."""
        self.failure = ""

    def _where(self) -> str:
        return f"rank {self.own_gradients.worker} (worker, step {self.step})"

    def seed(self) -> None:
        """Random numbers of this step, or of one batch of several."""
        self.own_gradients.seed(self.step, self._part)

    # ---- hooks

    @property
    def reads(self) -> bool:
        """Whether this rank needs the samples."""
        return True

    @property
    def holds(self) -> int:
        """Which parameters this rank holds, where others hold others."""
        return 0

    @property
    def averages_gradients(self) -> bool:
        """Whether the step under way takes the mean over the ranks."""
        return True

    def backward(self, parts: Parts, share: int, weight: float) -> float:
        """Leave the gradient of `weight` times this rank's loss on the parameters; returns the loss. `parts` are of
        `share` samples together."""
        self.module.train()
        mean, computed = MeanLoss(), 0
        for self._part, (batch, num_samples) in enumerate(parts):
            assert batch is not None
            computed += num_samples
            is_last = computed == share
            self.exchange(is_last)
            if self._part:
                self.seed()
            if self.job.sync_batchnorm:
                count_batch(self.module, bool(num_samples))
            returned = self.forward(batch)
            if self._part == 0 and is_last:
                value = mean.add(returned, num_samples)
                self._go_back(*self.weigh(returned, weight), value)
            else:
                self._add_part(returned, mean, num_samples, share, weight, is_last)
        return mean.value

    def _go_back(self, loss: torch.Tensor, factor: float, value: float) -> None:
        """The backward pass of `factor` times the loss of a batch, whose mean is `value`."""
        factor *= self.loss_factor
        if value - value != 0.0:
            factor = float("nan")  # poisons the reduced gradient, so that every rank sees it
        added_up = self._addresses() if self._part and self.parallel is not None else {}
        with explained_tables(self.module, loss):
            self.go_back(loss if factor == 1.0 else loss * factor)
        if self.parallel is not None:
            self.parallel.check_all_used(added_up)

    def go_back(self, loss: torch.Tensor) -> None:
        """The backward pass."""
        loss.backward()

    def _go_back_traced(self, loss: torch.Tensor) -> None:
        """The same; after the last bucket has been sent on its way, the thread only waits."""
        hook = self.parallel.hook if self.parallel is not None else None
        waiting = trace.waiting_at_the_end("wait for the mean gradient")
        codes = hook is not None and hook.encoder is not None
        with trace.span("backward", trace.COMPUTE), nullcontext() if codes else waiting:
            loss.backward()

    def _add_part(
        self, returned: BatchLoss, mean: MeanLoss, num_samples: int, share: int, weight: float, is_last: bool
    ) -> None:
        """Add one of several batches to the gradient and to the mean loss. Sums of losses are added up as they are: by
        how much all of them are divided is known with the last one."""
        if returned.weight is None:
            value = mean.add(returned, num_samples)
            self._go_back(returned.total, weight * num_samples / share, value)
            return
        if not num_samples:
            returned = BatchLoss(returned.total * 0.0, 0.0)
        value = mean.add(returned, num_samples)
        assert mean.weight is not None
        factor = self.weight_of_sums(mean.weight, weight) if is_last else 1.0
        if factor != 1.0 and self.rescales_first:
            scale_gradients(self.gradients(), factor)
        self._go_back(returned.total, factor if self.rescales_first else 1.0, value)
        if factor != 1.0 and not self.rescales_first:
            scale_gradients(self.gradients(), factor)

    def forward(self, batch: Batch) -> BatchLoss:
        """The loss of a batch."""
        with self.in_place.around():
            if self.parallel is not None:
                return self.parallel.loss(self.recipe.gradient, batch, self.seed)
            return read_loss(self.recipe.gradient.loss(self.module, batch))

    def _addresses(self) -> dict[int, int]:
        """Where the dense gradients are, by parameter."""
        held = ((id(one), one.grad) for one in self._trainable)
        return {key: one.data_ptr() for key, one in held if one is not None and not one.is_sparse}

    def exchange(self, whether: bool) -> None:
        """Let the backward pass to come exchange gradients, or not."""
        if self.parallel is not None:
            self.parallel.exchange(whether)

    @property
    def weighs_sums(self) -> bool:
        """Whether ranks add up what their losses' sums are divided by (collective)."""
        return self.averages_gradients

    def weigh(self, returned: BatchLoss, weight: float) -> tuple[torch.Tensor, float]:
        """What goes backward, and the weight that makes the mean over ranks of it the mean over all that counts."""
        if returned.weight is not None and self.weighs_sums:
            return returned.total, weight_among_all(returned.weight)
        return returned.mean, weight

    def weight_of_sums(self, divisor: float, weight: float) -> float:
        """The same weight, of sums of losses that all batches of this rank's step divide by `divisor` together."""
        if self.weighs_sums:
            return weight_among_all(divisor)
        return weight / divisor if divisor else 0.0

    def gradients(self) -> list[torch.Tensor]:
        """What this rank holds of the gradient, of sparse ones the numbers."""
        return numbers_of_gradients(self._trainable)

    def judge(self, value: float, part: float) -> tuple[float, bool]:
        """(the loss to report, whether the gradient is finite) of this rank's `part` of the step, with loss `value`."""
        return value, all_finite(self.gradients())

    def clip(self) -> None:
        """Clip the gradient, which is finite, before the step."""
        self.updates.shape(self.gradients)

    def follow_schedule(self) -> None:
        """Set the learning rates of this step."""
        self.updates.follow(self.samples, self.num_replicas, self.holds)

    def averaged(self) -> Averaged | None:
        """What lets the module hold its average for a while, where validations measure that."""
        ema = self.updates.ema
        return ema.swapped if ema is not None and self.job.validate_ema else None

    def update_ema(self) -> None:
        """All ranks hold the same update: the moving average of the weights follows."""
        self.updates.moved()

    def step_optimizer(self) -> None:
        """One step with the gradients that are there."""
        self.own_step()

    def on_nonfinite(self, value: float, count: int) -> None:
        """The gradient of these `count` samples was not finite: they are not used."""
        self.nonfinite += 1
        if self.recipe.update.on_nonfinite == "stop":
            here = f"{self.where()}: loss is {value:g}" if value - value != 0.0 else ""
            self.failure = here or f"step {self.step}: the averaged gradient is not finite"


class WeighsAtLast(Stepper):
    """A stepper whose ranks are in one process: gradients of sums are divided by the weight of all when that is known,
    which is after the backward pass.

    Attributes:
        weight: of what the losses of this step are sums over; None while none was.
    """

    rescales_first = False
    weight: float | None = None

    def weigh(self, returned: BatchLoss, weight: float) -> tuple[torch.Tensor, float]:
        if returned.weight is None:
            return returned.mean, weight
        return returned.total, self.weight_of_sums(returned.weight, weight)

    def weight_of_sums(self, divisor: float, weight: float) -> float:
        """1: see above."""
        self.weight = (self.weight or 0.0) + divisor
        return 1.0


def _nothing() -> None:
    """The hook of a world that has nothing to do there."""
