"""Workers under local SGD, all of them in one process: what a simulation computes.

Invariants: every worker has a module and an optimizer of its own, and steps as over MPI. At an averaging nobody's state
is touched before everybody has come to it, and then everybody's at once, in the order of ranks. So parameters are those
of the run over MPI wherever sums do not depend on their order, and there to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mpitrain.codecs import add_message, whole, write_message
from mpitrain.codecs.eightbit import EightBitEncoder
from mpitrain.data.read.batch import Batch
from mpitrain.job import Job
from mpitrain.model.building.compiling import compile_in_place
from mpitrain.model.gradient.accumulation import LeaseReader
from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.strategies.local_sgd import LocalSGD
from mpitrain.training.local_sgd.averager import Ask, Averager
from mpitrain.training.local_sgd.joint_replica import replica_of
from mpitrain.training.local_sgd.means import CASTS, by_kind, equal_parts, name_of_piece
from mpitrain.training.local_sgd.replica import LocalReplica
from mpitrain.training.measure import build_optimizer, read_nothing_ahead
from mpitrain.training.recipe import recipe_of
from mpitrain.training.validations.validation import Measure

Fetch = Callable[[int, int, int], Batch]


def make_replicas(
    job: Job,
    lr: float | None,
    module: nn.Module,
    means: MeansInOneProcess,
    fetch: Fetch,
    epoch_samples: int,
    make_measure: Callable[[nn.Module], Measure | None],
) -> list[LocalReplica]:
    """The workers of a job under local SGD.

    Args:
        lr: in place of the job's own rate, unless it is None.
        module: the first worker's; the others get copies of it.
        means: of the parameters of all workers.
        fetch: `fetch(epoch, start, count) -> batch`; epoch_samples: in an epoch.
        make_measure: makes what measures a module.
    """
    strategy = job.strategy
    assert isinstance(strategy, LocalSGD)
    number = len(means.shares)

    recipe = recipe_of(job, strategy, number, epoch_samples)
    leases = LeaseReader(fetch, read_nothing_ahead, recipe.gradient.part_samples)
    replicas = []
    for rank, own in enumerate([module, *(copy.deepcopy(module) for _ in range(number - 1))]):
        if rank:
            compile_in_place(own, job.compile)  # a copy is not
        optimizer = build_optimizer(job, own, lr)
        averager = Averager(own, optimizer, strategy, means=means.shares[rank])
        replica = replica_of(job.step is not None)(
            averager, leases.read, job, recipe, rank, measure=make_measure(own),
        )  # fmt: skip
        replica.train(own, Rates(optimizer))
        replicas.append(replica)
    return replicas


class MeansInOneProcess:
    """Means of tensors over ranks that are all in one process, as `Means` takes them over a group. What a rank alone
    would have sent is counted on its `Share`."""

    class Share:
        """One rank's count."""

        def __init__(self) -> None:
            self.sent_bytes, self.codec_s = 0.0, 0.0

        def state(self) -> dict[str, Any]:
            """Nothing: a simulation writes no checkpoints."""
            return {}

        def restore(self, state: dict[str, Any]) -> None:
            """Nothing."""

    def __init__(self, wire: str, size: int):
        self.wire, self.size = wire, size
        self.shares = [self.Share() for _ in range(size)]
        self._parts: dict[tuple[str, int], list[EightBitEncoder]] = {}
        self._own: dict[str, list[EightBitEncoder]] = {}

    @torch.no_grad()
    def reduce(self, asks: list[Ask]) -> list[Any]:
        """Answer the same question of all ranks."""
        first = asks[0]
        if first.numbers:
            return [torch.tensor([ask.numbers for ask in asks])] * len(asks)
        if first.part is not None:
            return [[row for ask in asks for row in ask.part or ()], *([[]] * (len(asks) - 1))]
        if first.first:
            return [[tensor.clone() for tensor in first.tensors] for _ in asks]
        means = self.means_of([ask.tensors for ask in asks], first.full, first.counted, first.piece)
        return [[mean.clone() for mean in means] for _ in asks]

    def means_of(
        self,
        everybody: list[list[torch.Tensor]],
        full: bool = False,
        counted: bool = True,
        piece: int | None = None,
    ) -> list[torch.Tensor]:
        """The mean of each tensor, of which every rank has brought one; sums are taken in rank order."""
        means: list[torch.Tensor] = [torch.empty(0)] * len(everybody[0])
        for name, indices in by_kind(everybody[0]).items():
            flats = [torch.cat([one[index].detach().reshape(-1) for index in indices]) for one in everybody]
            wire = "full" if full else self.wire
            flat = (
                self._eight_bits(name_of_piece(name, piece), flats)
                if wire == "int8"
                else self._mean(flats, CASTS.get(wire), counted)
            )
            split = flat.split([everybody[0][index].numel() for index in indices])
            for index, mean in zip(indices, split, strict=True):
                means[index] = mean.view(everybody[0][index].shape)
        return means

    def _mean(self, flats: list[torch.Tensor], cast: torch.dtype | None, counted: bool) -> torch.Tensor:
        numel, dtype = flats[0].numel(), flats[0].dtype
        self._sent(counted * 2 * (self.size - 1) / self.size * numel * (cast or dtype).itemsize)
        if cast is not None:
            flats = [flat.to(cast).float() for flat in flats]
        total = flats[0].clone()
        for flat in flats[1:]:
            total.add_(flat)
        total.div_(self.size)
        return total if cast is None else total.to(cast).to(dtype)

    def _eight_bits(self, name: str, flats: list[torch.Tensor]) -> torch.Tensor:
        arrived: list[list[torch.Tensor]] = []
        for rank, flat in enumerate(flats):
            parts = equal_parts(flat.float(), self.size)
            encoders = self._parts.setdefault((name, rank), [EightBitEncoder(dense_below=0) for _ in parts])
            arrived.append([one.encode(whole(part)) for one, part in zip(encoders, parts, strict=True)])
        owners = self._own.setdefault(name, [EightBitEncoder(dense_below=0) for _ in flats])
        parts = equal_parts(flats[0].float(), self.size)
        for rank, (owner, part) in enumerate(zip(owners, parts, strict=True)):
            mean = torch.zeros_like(part)
            for messages in arrived:
                add_message(messages[rank], whole(mean))
            own = owner.encode(whole(mean.div_(self.size)))
            write_message(own, whole(part))
            self.shares[rank].sent_bytes += 2 * (self.size - 1) * own.numel()
        return torch.cat(parts)[: flats[0].numel()].to(flats[0].dtype)

    def _sent(self, num_bytes: float) -> None:
        for share in self.shares:
            share.sent_bytes += num_bytes
