"""Small jobs of every kind that people have, in float64, and what plain torch makes of them in one process."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from mpitrain.model.recipe import seed_step
from mpitrain.strategies.sampling.step_partition import StepPartition
from tests import toy

NUM_TOKENS = 17


def tokens(batch):
    """Whole numbers below `NUM_TOKENS`, five a sample."""
    return (batch["x"] * 8 + 8).long()


class Tied(nn.Module):
    """The embedding is the output layer, too."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, 6)
        self.middle = nn.Linear(6, 6)
        self.output = nn.Linear(6, NUM_TOKENS)
        self.output.weight = self.embedding.weight

    def forward(self, words):
        return self.output(torch.tanh(self.middle(self.embedding(words))))


class Packed(nn.Module):
    """An LSTM over sequences of one to five numbers."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x.unsqueeze(2), lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (state, _) = self.lstm(packed)
        return self.head(state[-1])


class Sparse(nn.Module):
    """An embedding whose gradient has rows of the words that occur alone."""

    def __init__(self, sparse=True):
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, 6, sparse=sparse)
        self.head = nn.Linear(6, 1)

    def forward(self, words):
        return self.head(self.embedding(words).mean(1))


def predicted_word(model, batch):
    words = tokens(batch)
    return nn.functional.cross_entropy(model(words[:, :4]).flatten(0, 1), words[:, 1:].flatten())


def packed_loss(model, batch):
    lengths = 1 + (batch["x"][:, 1:] > 0).sum(1)
    return ((model(batch["x"].double(), lengths) - batch["y"].double()) ** 2).mean()


def sparse_loss(model, batch):
    return ((model(tokens(batch)) - batch["y"].double()) ** 2).mean()


def square_loss(model, batch):
    return ((model(batch["x"].double()) - batch["y"].double()) ** 2).mean()


def with_batch_norm():
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1)).double()


def with_dropout():
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1)).double()


def partly_frozen():
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    model[0].requires_grad_(False)
    return model


def plain():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def groups(parameters):
    first, second, *rest = parameters
    return torch.optim.SGD(
        [{"params": rest}, {"params": [first], "lr": 0.01, "weight_decay": 0.1}, {"params": [second], "lr": 0.0}],
        lr=0.05, momentum=0.9,
    )  # fmt: skip


def named_groups(named_parameters):
    named = dict(named_parameters)
    return torch.optim.AdamW(
        [
            {"params": [one for name, one in named.items() if name.endswith("weight")], "weight_decay": 0.1},
            {"params": [one for name, one in named.items() if name.endswith("bias")], "lr": 0.003},
        ],
        lr=0.01,
    )


def trained_only(parameters):
    return toy.sgd([one for one in parameters if one.requires_grad])


JOBS = {
    "batch norm": {"model": with_batch_norm},
    "tied weights": {"model": lambda: Tied().double(), "loss": predicted_word},
    "frozen layer": {"model": partly_frozen},
    "frozen layer, not in the optimizer": {"model": partly_frozen, "optimizer": trained_only},
    "groups": {"model": plain, "optimizer": groups},
    "groups by name": {"model": plain, "optimizer": named_groups},
    "packed sequences": {"model": lambda: Packed().double(), "loss": packed_loss},
    "dropout": {"model": with_dropout},
}
_WORDS = {"loss": sparse_loss, "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05)}
SPARSE = {
    "sparse": {"model": lambda: Sparse().double()} | _WORDS,
    "no longer sparse": {"model": lambda: Sparse(sparse=False).double()} | _WORDS,
}


def job(name, batch_size=12, **changes):
    fields = {"loss": square_loss, "optimizer": toy.sgd, "data": toy.Memory(num_samples=28)}
    return toy.make_job(**fields | {"batch_size": batch_size, "epochs": 2} | (JOBS | SPARSE)[name] | changes)


def by_ranks(one, num_ranks, average_buffers=False):
    """What ranks make of a job together, in one process: each its own samples, its own draws and its own running
    statistics (or, after every step, the mean of all), and one step with the mean of all gradients. Returns the first
    rank's model."""
    torch.manual_seed(one.seed)
    module = one.model()
    optimizer = one.optimizer(
        module.named_parameters() if one.optimizer is named_groups else module.parameters()
    )
    reader, num_samples, step = one.data.reader(None, one.seed), one.data.num_samples, 0
    buffers = [[buffer.clone() for buffer in module.buffers()] for _ in range(num_ranks)]
    rounds = StepPartition(num_samples, one.batch_size, num_ranks, num_samples, False)
    for _ in range(one.epochs):
        while (taken := rounds.take_step()) is not None:
            optimizer.zero_grad()
            count = taken.num_samples
            for rank, lease in enumerate(taken.leases):
                _copy(buffers[rank], module.buffers())
                seed_step(one.seed, rank, step)
                loss = one.loss(module, reader.batch(lease.epoch, lease.start, lease.num_samples))
                (loss * (lease.num_samples / count)).backward()
                _copy(module.buffers(), buffers[rank])
            optimizer.step()
            if average_buffers:
                for same in zip(*buffers, strict=True):
                    if same[0].is_floating_point():
                        mean = torch.stack(same).mean(0)
                        _copy([mean] * num_ranks, same)
            rounds.settle_step()
            step += 1
        rounds.next_epoch()
    _copy(buffers[0], module.buffers())
    return module.state_dict()


def _copy(source, target):
    with torch.no_grad():
        for one, other in zip(source, target, strict=True):
            other.copy_(one)
