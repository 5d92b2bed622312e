"""The model of one large embedding whose steps benchmarks time, its batches, and torch RPC's way of training it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

WIDTH, WORDS, BATCHES = 16, 8, 8


def tower(hidden: int) -> nn.Module:
    """The dense layers, of `hidden` units."""
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, 1))


def zipf(uniform: torch.Tensor, rows: int) -> torch.Tensor:
    """Ids of Zipf's law with exponent 1, of numbers below 1."""
    return (float(rows) ** uniform).long().sub(1).clamp(0, rows - 1)


class Ranking(nn.Module):
    """The words' rows added up, and two layers."""

    def __init__(self, table: nn.Module, hidden: int):
        super().__init__()
        self.table, self.tower = table, tower(hidden)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.tower(self.table(words))
        return found


class Batches:
    """`step(words, clicked)` is one training step of a worker; `run` takes them on its batches, one after the other."""

    def __init__(self, rows: int, batch: int, worker: int):
        torch.manual_seed(0)
        draw = torch.Generator().manual_seed(worker)
        uniform = torch.rand(BATCHES, batch, WORDS, generator=draw, dtype=torch.float64)
        self.words = zipf(uniform, rows)
        self.clicked = torch.randint(0, 2, (BATCHES, batch, 1), generator=draw).float()
        self.num_steps = 0

    def run(self, num_steps: int) -> None:
        """So many steps."""
        for _ in range(num_steps):
            at = self.num_steps % BATCHES
            self.num_steps += 1
            self.step(self.words[at], self.clicked[at])

    def step(self, words: torch.Tensor, clicked: torch.Tensor) -> None:
        raise NotImplementedError


class RemoteTables(Batches):
    """Row r lies on server r mod `num_servers`, which is the process `rank0`, `rank1` ... of torch's RPC; `together`
    makes the workers' towers one."""

    def __init__(
        self, rows: int, batch: int, worker: int, num_servers: int, hidden: int,
        together: Callable[[nn.Module], nn.Module],
    ):  # fmt: skip
        from torch.distributed.nn.api.remote_module import RemoteModule
        from torch.distributed.optim import DistributedOptimizer
        from torch.distributed.rpc import RRef

        super().__init__(rows, batch, worker)
        size = -(-rows // num_servers)
        self.tables = [
            RemoteModule(f"rank{server}/cpu", nn.Embedding, args=(size, WIDTH), kwargs={"sparse": True})
            for server in range(num_servers)
        ]
        self.tower = together(tower(hidden))
        parameters = [one for remote in self.tables for one in remote.remote_parameters()]
        parameters += [RRef(one) for one in self.tower.parameters()]
        self.optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.01)

    def step(self, words: torch.Tensor, clicked: torch.Tensor) -> None:
        from torch.distributed import autograd

        num = len(self.tables)
        with autograd.context() as context:
            flat = words.reshape(-1)
            where = [torch.nonzero(flat % num == server).squeeze(1) for server in range(num)]
            futures = [one.forward_async(flat[at] // num) for one, at in zip(self.tables, where, strict=True)]
            rows = torch.cat([future.wait() for future in futures])
            bags = torch.zeros(len(words), WIDTH).index_add(0, torch.cat(where) // WORDS, rows)
            loss = nn.functional.binary_cross_entropy_with_logits(self.tower(bags), clicked)
            autograd.backward(context, [loss])
            self.optimizer.step(context)
