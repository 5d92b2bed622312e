"""How large each worker's batches are.

Invariants: a batching decides sizes from counts and measured speeds that it is handed; it never asks a
clock. Sizes of one round add up to a constant, so the rate keeps its meaning whoever is slow.

mu is a worker's batch and lambda the number of workers: keeping mu * lambda constant keeps the accuracy of the
small batch when workers are added (Zhang, Gupta, Lian and Liu, "Staleness-aware Async-SGD", IJCAI 2016; Gupta,
Zhang and Wang, "Model Accuracy and Runtime Tradeoff in Distributed Deep Learning", ICDM 2016).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from mpitrain.values import Value, register


@dataclass(frozen=True, repr=False)
class Batching(Value):
    """Base. Its memory is a JSON-able dict that the role owns."""

    measures: ClassVar[bool] = False  # times, so that a recorded run cannot be repeated from its order alone

    def size(self, memory: dict[str, Any], worker: int, workers: Collection[int], batch_size: int) -> int:
        """Samples of `worker`'s next batch, when `workers` take part and the job says `batch_size`."""
        raise NotImplementedError

    def samples_at_once(self, part_samples: int, num_workers: int) -> int:
        """As of a `Strategy`."""
        return part_samples

    def measured(self, memory: dict[str, Any], worker: int, num_samples: int, seconds: float) -> None:
        """`worker` took so long, answer to push, for so many samples."""

    def weight(self, num_samples: int, num_workers: int, batch_size: int) -> float:
        """What a gradient of `num_samples` samples weighs beside its damping."""
        return 1.0


@register("batching", "per_worker")
class PerWorker(Batching):
    """Every worker's batch is the job's `batch_size`."""

    def size(self, memory: dict[str, Any], worker: int, workers: Collection[int], batch_size: int) -> int:
        return batch_size


@register("batching", "per_round")
class PerRound(Batching):
    """The job's `batch_size` is divided among the workers that take part.

    Where it does not divide, the lower ones take one sample more; each takes at least one.
    """

    def size(self, memory: dict[str, Any], worker: int, workers: Collection[int], batch_size: int) -> int:
        share, longer = divmod(batch_size, len(workers))
        return max(1, share + (sorted(workers).index(worker) < longer))

    def samples_at_once(self, part_samples: int, num_workers: int) -> int:
        return -(-part_samples // num_workers)


@register("batching", "by_speed")
class BySpeed(Batching):
    """Slow workers get smaller batches, in proportion to the samples a second that each was last seen to make.

    A round of lambda batches still has `lambda * batch_size` samples.
    A gradient weighs its samples over `batch_size`, so a synchronous update is still the mean over all samples of
    the round, and an asynchronous one moves in proportion to what it has seen.

    Args:
        smoothing: share of the newest measurement in the running mean of a worker's speed, in (0, 1].
    """

    smoothing: float = 0.3
    measures: ClassVar[bool] = True

    def check(self) -> None:
        self.hold("smoothing", 0 < self.smoothing <= 1, "must lie in (0, 1]")

    def size(self, memory: dict[str, Any], worker: int, workers: Collection[int], batch_size: int) -> int:
        speeds = {other: memory[str(other)] for other in workers if str(other) in memory}
        if not speeds:
            return batch_size
        usual = sum(speeds.values()) / len(speeds)
        ranks = sorted(workers)
        return _divide(batch_size * len(ranks), [speeds.get(rank, usual) for rank in ranks])[
            ranks.index(worker)
        ]

    def samples_at_once(self, part_samples: int, num_workers: int) -> int:
        """As of a `Strategy`."""
        return part_samples

    def measured(self, memory: dict[str, Any], worker: int, num_samples: int, seconds: float) -> None:
        speed = num_samples / max(seconds, 1e-9)
        before = memory.get(str(worker), speed)
        memory[str(worker)] = before + self.smoothing * (speed - before)

    def weight(self, num_samples: int, num_workers: int, batch_size: int) -> float:
        return num_samples / batch_size


def _divide(total: int, weights: list[float]) -> list[int]:
    """`total` in proportion to `weights`, in whole parts that add up (largest remainders), each at least 1: what that
    takes comes from the largest part."""
    exact = [total * weight / sum(weights) for weight in weights]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: (parts[index] - exact[index], index))
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    while 0 in parts:
        parts[parts.index(max(parts))] -= 1
        parts[parts.index(0)] += 1
    return parts
