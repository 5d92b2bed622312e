"""A job whose loss leaves parameters out: `other` always, or, where SOMETIMES is set, from the third step on in all
ranks but the first. FIND is set where the job says so itself."""

import os

import torch
from torch import nn

from mpitrain.mpi import runtime
from tests import toy

SOMETIMES = "SOMETIMES" in os.environ
more = {"find_unused_parameters": True} if "FIND" in os.environ else {}


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)
        self.head, self.other = nn.Linear(4, 1), nn.Linear(4, 1)
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += self.training
        hidden = self.norm(self.body(x))
        if SOMETIMES and (self.num_calls < 3 or runtime.start().rank == 0):
            return self.head(hidden) + self.other(hidden)
        return self.head(hidden)


job = toy.make_job(model=Wide, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5), **more)
