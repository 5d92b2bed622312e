"""Collectives of tensors among threads, as `training/synchronous/collectives.py` has them over a process group."""

from __future__ import annotations

import torch

from mpitrain.threads.sums import Sums
from mpitrain.training.synchronous.collectives import GroupCollectives


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
