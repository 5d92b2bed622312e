"""A step on several batches, one after the other: their gradients are added up to that of one large batch.

Invariants: what a worker is dealt for a step is one lease, so accounting, restarts and messages know nothing of the
batches that it is computed in. The gradient is the mean over all samples, or, where the loss returns (sum, weight), the
sum of all over the weight of all. A lease that is one batch is computed as if nothing here existed, to the bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from mpitrain.data.read.batch import Batch
from mpitrain.messages import Lease
from mpitrain.model.gradient.loss import BatchLoss
from mpitrain.strategies.sampling.dealer import share_out
from mpitrain.system import trace

Part = tuple[Batch, int]  # with its number of samples


class LeaseReader:
    """Reads leases in batches of at most `size` samples, the next one while the caller computes; 0: each in one.

    Args:
        fetch: `fetch(epoch, start, count) -> batch`; prefetch: the same arguments, a hint.
    """

    def __init__(
        self,
        fetch: Callable[[int, int, int], Batch],
        prefetch: Callable[[int, int, int], None],
        size: int = 0,
    ):
        self.fetch, self._prefetch, self.size = fetch, prefetch, size
        self._announced: deque[Lease] = deque(maxlen=2)
        trace.watch(self, fetch=("read", trace.READ))

    def announce(self, lease: Lease) -> None:
        """This lease will be read after those that were announced before."""
        if self.size:  # further batches of the lease under way come first
            self._announced.append(lease.cut(self.size)[0])
        else:
            self._prefetch(lease.epoch, lease.start, lease.num_samples)

    def read(self, lease: Lease) -> Iterator[Part]:
        """The batches of a lease, in order."""
        return self.read_all(lease.cut(self.size))

    def read_all(self, parts: Sequence[Lease]) -> Iterator[Part]:
        """The batches of a lease that has been cut already."""
        for number, part in enumerate(parts, 1):
            batch = self.fetch(part.epoch, part.start, part.num_samples)
            following = list(parts[number : number + 1])
            if not following:
                following = [*self._announced]
                self._announced.clear()
            for one in following:
                self._prefetch(one.epoch, one.start, one.num_samples)
            yield batch, part.num_samples


def read_alike(leases: LeaseReader, lease: Lease, largest: int) -> Iterator[Part]:
    """The batches of a lease, as many as one of `largest` samples has, which has at most one more: for ranks that talk
    in every forward pass. One that is a sample short computes one more batch, which has no samples that count."""
    num_parts = -(-largest // leases.size) if leases.size else 1
    if lease.num_samples < num_parts:
        yield next(leases.read(lease._replace(num_samples=1)))[0], 0
        num_parts = lease.num_samples
    shares = (share_out(lease.start, lease.num_samples, num_parts, part) for part in range(num_parts))
    yield from leases.read_all([Lease(lease.epoch, *share) for share in shares])


class MeanLoss:
    """The mean loss over the batches of a step, and what weight it has: None for a mean over samples."""

    def __init__(self) -> None:
        self.weight: float | None = None
        self._losses: list[tuple[float, float]] = []

    def add(self, loss: BatchLoss, num_samples: int) -> float:
        """One more batch; returns its own mean."""
        value = float(loss.mean.detach())
        self._losses.append((value, float(num_samples) if loss.weight is None else loss.weight))
        self.weight = None if loss.weight is None else sum(weight for _, weight in self._losses)
        return value

    @property
    def value(self) -> float:
        """Over all batches so far."""
        if len(self._losses) == 1:
            return self._losses[0][0]
        divisor = sum(weight for _, weight in self._losses)
        return sum(value * weight for value, weight in self._losses) / divisor if divisor else 0.0


def backward_in_parts(
    parts: Iterable[Part],
    num_samples: int,
    loss: Callable[[Batch], BatchLoss],
    seed: Callable[[int], None],
    parameters: Iterable[Any],
    factor: float = 1.0,
) -> MeanLoss:
    """Forward and backward over the batches of a step of `num_samples`; leaves the gradient of `factor` times their
    mean loss on the parameters. `seed(number)`: called before each batch."""
    mean, rescale = MeanLoss(), False
    loss = trace.watched(loss, "forward", trace.COMPUTE)
    go_back = trace.watched(torch.Tensor.backward, "backward", trace.COMPUTE)
    for number, (batch, count) in enumerate(parts):
        seed(number)
        returned = loss(batch)
        if count == num_samples:  # the only one
            one = returned.mean
        elif returned.weight is None:
            one = returned.total * (count / num_samples)
        else:
            one, rescale = returned.total, True
        go_back(one if factor == 1.0 else one * factor)
        mean.add(returned, count)  # waits for the device, which has the backward pass to do by now
    if rescale and mean.weight != 1.0:
        gradients = [one.grad for one in parameters if one.grad is not None]
        scale_gradients(gradients, 1.0 / mean.weight if mean.weight else 0.0)
    return mean


@torch.no_grad()
def scale_gradients(gradients: list[torch.Tensor], factor: float) -> None:
    """Multiply them in place."""
    if gradients:
        torch._foreach_mul_(gradients, factor)
