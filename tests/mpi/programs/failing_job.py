"""A job that fails on one rank, where an environment variable says: JOB_RANK in the job file itself, LOSS_RANK in its
second loss, SERVER_RANK in its fourth update."""

import os

import torch

from mpitrain.system.launched.launch_variables import launched_rank
from tests import toy


def fails_here(where: str) -> bool:
    return os.environ.get(where) == str(launched_rank())


if fails_here("JOB_RANK"):
    raise KeyError("planted in the job file")

calls: list[int] = []  # every worker is dealt two batches before anybody is dealt a third


def loss(model, batch):
    calls.append(1)
    if fails_here("LOSS_RANK") and len(calls) == 2:
        raise RuntimeError("planted in the loss")
    return toy.square_loss(model, batch)


class Failing(torch.optim.SGD):
    elementwise = True
    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        if fails_here("SERVER_RANK") and self.num_steps == 4:
            raise RuntimeError("planted in the server")
        super().step()


job = toy.make_job(loss=loss, optimizer=lambda p: Failing(p, lr=0.1))
