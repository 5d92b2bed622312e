"""Collectives of tensors among the ranks that take the same steps: what local SGD and the checkpoints of synchronous
runs ask of one another.

Invariants: all ranks call the same in the same order, with the same shapes and dtypes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from mpitrain.mpi.process_group.packing import broadcast_packed
from mpitrain.system.launched.ranks import Ranks
from mpitrain.threads.ranks import ThreadRanks
from mpitrain.threads.sums import Sums


class GroupCollectives:
    """Over a process group, all ranks by default."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def mean(self, flat: torch.Tensor) -> None:
        """`flat` becomes the mean of all ranks."""
        dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self.group)

    def largest(self, numbers: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks' numbers, each by itself; in place."""
        if self.size > 1:
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.group)
        return numbers

    def everybody(self, own: torch.Tensor) -> list[torch.Tensor]:
        """What every rank brings, in the order of ranks."""
        rows = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(rows, own, group=self.group)
        return rows

    def exchange(self, messages: torch.Tensor) -> torch.Tensor:
        """Row r goes to rank r; answers the rows that this rank gets, in the order of ranks."""
        arrived = torch.empty_like(messages)
        dist.all_to_all_single(arrived, messages, group=self.group)
        return arrived

    def from_first(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Rank 0's values; new tensors."""
        values = [tensor.detach().clone() for tensor in tensors]
        broadcast_packed(values, lambda one: dist.broadcast(one, 0, group=self.group), is_root=self.rank == 0)
        return values


class ThreadCollectives(GroupCollectives):
    """Over the ranks of `sums`. What one of them brings, the others read and do not change."""

    def __init__(self, sums: Sums):
        self.sums, self.group = sums, None
        self.size, self.rank = sums.size, sums.place

    def mean(self, flat: torch.Tensor) -> None:
        flat.copy_(self.sums.add_up(flat).div_(self.size))

    def largest(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.copy_(torch.stack(self.everybody(numbers)).amax(0))

    def everybody(self, own: torch.Tensor) -> list[torch.Tensor]:
        return [one.to(own.device) for one in self.sums.bring(own.clone())]

    def exchange(self, messages: torch.Tensor) -> torch.Tensor:
        return torch.stack([one[self.rank] for one in self.everybody(messages)])

    def from_first(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        values = [tensor.detach().clone() for tensor in tensors]
        self.sums.first_of(values)
        return values


def collectives_of(runtime: Ranks) -> GroupCollectives:
    """Of all ranks of a run."""
    return ThreadCollectives(runtime.sums()) if isinstance(runtime, ThreadRanks) else GroupCollectives()
