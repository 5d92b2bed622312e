"""Jobs over a table of rows whose gradients are sums of dyadic numbers, with `sparse=True` and without."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import mpitrain as mt
from tests import small_jobs, toy

ROWS, WIDTH = 5 * small_jobs.NUM_TOKENS, 4


def many(batch):
    """Five words a sample of 85, so that ranks have few in common."""
    words = small_jobs.tokens(batch)
    return words + small_jobs.NUM_TOKENS * torch.arange(5, device=words.device)


def few(batch):
    """Of three words, which all ranks have."""
    return small_jobs.tokens(batch) % 3


class Sum(nn.Module):
    """The sum of a sample's rows, and a bias."""

    def __init__(self, table):
        super().__init__()
        self.table, self.bias = table, nn.Linear(1, WIDTH)
        nn.init.ones_(self.bias.weight)
        nn.init.zeros_(self.bias.bias)

    def forward(self, words):
        rows = self.table(words)
        return (rows.sum(1) if rows.dim() == 3 else rows) + self.bias(
            torch.ones(len(words), 1, device=words.device)
        )


class Summed(Sum):
    """Of a layer of torch's own."""

    def __init__(self, layer, sparse):
        super().__init__(layer(ROWS, WIDTH, sparse=sparse))
        with torch.no_grad():
            self.table.weight.copy_(torch.arange(ROWS * WIDTH).reshape(ROWS, WIDTH) % 16 / 8 - 1)


def linear_loss(model, batch, words):
    return (model(words(batch)) * batch["y"]).mean()


def square_loss(model, batch, words):
    return ((model(words(batch)) - batch["y"]) ** 2).mean()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=2.0**-4)


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, lr=2.0**-4)


LAYERS = {"embedding": nn.Embedding, "bag": partial(nn.EmbeddingBag, mode="sum")}
WORDS = {"many": many, "few": few}
OPTIMIZERS = {"sgd": sgd, "adagrad": adagrad}
KINDS = [(layer, words, optimizer) for layer in LAYERS for words in WORDS for optimizer in OPTIMIZERS]


def make_job(sparse=True, layer="embedding", words="many", optimizer="sgd", loss=linear_loss, **changes):
    """For four ranks."""
    return toy.make_job(
        **{
            "model": lambda: Summed(LAYERS[layer], sparse),
            "loss": partial(loss, words=WORDS[words]),
            "optimizer": OPTIMIZERS[optimizer],
            "batch_size": 4,
        }
        | changes
    )


def step(model, optimizers, batch):
    """Of a job with two optimizers."""
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    loss = linear_loss(model, batch, many)
    loss.backward()
    for optimizer in optimizers.values():
        optimizer.step()
    return loss


def joint_job(sparse):
    changes = {"optimizer": {"table": adagrad, "bias": sgd}, "step": step, "batch_size": 4}
    return toy.make_job(model=lambda: Summed(nn.Embedding, sparse), loss=None, **changes)


class Served(Sum):
    """Of a table on servers alone, whose rows begin as zeros."""

    def __init__(self, mode=None, partition="hash"):
        super().__init__(mt.ServedEmbedding(ROWS, WIDTH, mode=mode, init="zeros", partition=partition))


class FromZeros(Summed):
    """Whose table begins as that of `Served`."""

    def __init__(self, sparse):
        super().__init__(nn.Embedding, sparse)
        nn.init.zeros_(self.table.weight)


def table_of(run_dir, job):
    """All rows of the table that a run has trained."""
    layer = mt.load(run_dir, job=job).table
    return layer(torch.arange(ROWS).view(-1, 1)).view(ROWS, WIDTH).detach()
