"""Small jobs for tests: data in memory, models whose gradients are known, and what serial training makes of
them.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mpitrain as mt
from mpitrain.data.format.catalogue import ArraySpec, Catalogue, ShardInfo
from mpitrain.data.read.transform import transformed
from mpitrain.model.gradient.accumulation import LeaseReader
from mpitrain.model.gradient.loss import read_loss
from mpitrain.model.recipe import GradientRule, Recipe, UpdateRule, seed_step
from mpitrain.strategies.ticks import Law, PerEpoch
from mpitrain.training.measure import build_optimizer


@dataclasses.dataclass(frozen=True)
class Memory:
    """A data source in memory: sample i of array `x` is a seeded draw on a dyadic grid, `y` a linear
    function of it. `window_samples`: said to be read together; None for all.
    """

    num_samples: int = 48
    num_features: int = 5
    window_samples: int | None = None

    def scan(self):
        arrays = {"x": ArraySpec((self.num_features,), "float32"), "y": ArraySpec((1,), "float32")}
        window = self.window_samples or self.num_samples
        return Catalogue((ShardInfo("memory", self.num_samples, window),), arrays, 1)

    def reader(self, catalogue, seed):
        return MemoryReader(self, seed)


class MemoryReader:
    def __init__(self, source, seed=0):
        self.seed, self.transforms = seed, []
        generator = torch.Generator().manual_seed(7)
        # multiples of 1/8 with |x| <= 1: products and short sums are exact in float32
        self.x = torch.randint(-8, 9, (source.num_samples, source.num_features), generator=generator) / 8.0
        self.y = self.x.sum(1, keepdim=True)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def batch(self, epoch, start, count):
        batch = {"x": self.x[start : start + count].clone(), "y": self.y[start : start + count].clone()}
        return transformed(self.transforms, batch, self.seed, epoch, np.arange(start, start + count))

    def prefetch(self, epoch, start, count):
        pass

    def sequential(self, batch_size, first=0, end=None):
        whole = slice(first, end)
        yield from (
            {"x": x, "y": y} for x, y in zip(self.x[whole].split(batch_size), self.y[whole].split(batch_size))
        )


def leases(reader):
    """What a replica reads of a source's reader."""
    return LeaseReader(reader.batch, reader.prefetch)


def recipe(loss, num_workers=1):
    """Of a job that asks for nothing but this loss."""
    return Recipe(GradientRule(loss), UpdateRule(law=Law(1, num_workers)))


def perceptron():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.25), nn.Linear(7, 1))


def normed():
    """With running statistics, which every forward pass moves."""
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1))


def wide(width):
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 1))


def three_layers():
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))


def square_loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def immense_sgd(parameters):
    return torch.optim.SGD(parameters, lr=3e38)


def immense_loss(model, batch):
    return 1e4 * square_loss(model, batch)


DIVERGING = {  # in one step
    "model": lambda: wide(8), "optimizer": immense_sgd, "loss": immense_loss, "epochs": 1,
    "tensor_plan": {"0": "column", "2": "row"},
}  # fmt: skip


def noised_by_hand(make, deviation, keys, num_parts=1):
    """An optimizer of `make` whose every step adds noise to the gradients first, drawn by the next of `keys`, a format
    of the part, for each of so many slices of every parameter."""

    def made(parameters):
        parameters, left = list(parameters), iter(keys)
        optimizer = make(parameters)

        def add(*_):
            key = next(left)
            for number, parameter in enumerate(parameters):
                for part, piece in enumerate(parameter.grad.chunk(num_parts)):
                    text = f"noise/0/{key.format(part=part)}/{number}"
                    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
                    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
                    piece += torch.randn(piece.shape, generator=generator, dtype=piece.dtype) * deviation

        optimizer.register_step_pre_hook(add)
        return optimizer

    return made


def keys_of_steps(num_samples, num_epochs, step_samples):
    """Of the noise in updates of all workers: the accepted samples before each."""
    return [
        f"{epoch * num_samples + start}/0/{{part}}"
        for epoch in range(num_epochs)
        for start in range(0, num_samples, step_samples)
    ]


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def two_groups(parameters):
    first, *rest = list(parameters)
    return torch.optim.AdamW(
        [{"params": rest}, {"params": [first], "lr": 0.003, "weight_decay": 0.1}], lr=0.01
    )


def hooked(parameters):
    """What people attach: clipping before the step, a scheduler after it."""
    parameters = list(parameters)
    optimizer = torch.optim.SGD(
        [{"params": parameters[1:]}, {"params": parameters[:1], "lr": 0.02}], lr=0.05, momentum=0.9
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    def clip(*_):
        nn.utils.clip_grad_norm_(parameters, 0.5)

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


SCHEDULERS = {
    "steps": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40),
    "warm up": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        ],
        [3],
    ),
}
BY_METRIC = {  # halves the rate after every validation, or after one that has brought nothing better
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=-1
    ),
    "no better": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0
    ),
}


def by_turns(model, optimizers, batch):
    """Two optimizers of two parts, the second one's step from where the first one's has led."""
    for optimizer in optimizers.values():
        optimizer.zero_grad()
        loss = square_loss(model, batch)
        loss.backward()
        optimizer.step()
    return loss


BY_TURNS = {
    "model": lambda: smooth(),
    "optimizer": {"0": sgd, "2": adam},
    "step": by_turns,
    "loss": square_loss,
}


class LookedUp(nn.Module):
    """Of whole numbers made of `x`."""

    def __init__(self, table, *layers):
        super().__init__()
        self.table, self.head = table, nn.Sequential(*layers, nn.Linear(3, 1)) if layers else nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.table((x * 8 + 8).long().clamp(0, 16)).mean(1))


NORMED = {
    "normed": normed,
    "normed in float64": lambda: normed().double(),
    "looked up": lambda: LookedUp(nn.Embedding(17, 3, sparse=True)),
    "served": lambda: LookedUp(mt.ServedEmbedding(17, 3)),
    "looked up, normed": lambda: LookedUp(nn.Embedding(17, 3, sparse=True), nn.BatchNorm1d(3)),
    "served, normed": lambda: LookedUp(mt.ServedEmbedding(17, 3), nn.BatchNorm1d(3)),
}


def dataset(num_samples=31):
    samples = MemoryReader(Memory(num_samples))
    return torch.utils.data.TensorDataset(samples.x, samples.y)


class Backwards(torch.utils.data.IterableDataset[tuple[torch.Tensor, ...]]):
    """A stream of `dataset()`, the last sample first."""

    def __len__(self):
        return 31

    def __iter__(self):
        return iter([*dataset()][::-1])


def noisy(batch, random):
    return {**batch, "x": batch["x"] + random.normal(5).to(batch["x"])}


def nested(batch, random):
    """A batch of tuples and dicts, with texts among them."""
    return (
        batch["x"],
        {"of": (batch["y"], [f"{number}.png" for number in range(len(batch["y"]))])},
        batch["y"],
    )


def nested_loss(model, batch):
    if isinstance(batch, tuple):
        x, both, y = batch
        assert torch.equal(both["of"][0], y) and len(both["of"][1]) == len(x)
        batch = {"x": x, "y": y}
    return square_loss(model, batch)


DATA = {
    "dataset": dataset,
    "shards": lambda: mt.Shards("same/*.h5"),  # of `dataset()`, in the folder of the launch
    "loader": lambda: mt.Samples(dataset(), num_workers=2),  # as a loader is taken; batches are the job's
    "stream": lambda: mt.Stream(Backwards(), num_workers=1),
    "weighted": lambda: mt.Weighted(dataset(), range(31), 29),
}


METRICS = {"collected": mt.Collected(lambda predictions, targets: {"middle": predictions.median()})}


def scheduled(fields):
    """Fields of a job that are fit for JSON, with the scheduler, model, metrics, transform and data that they
    name."""
    plain = {"plain": lambda parameters: torch.optim.SGD(parameters, lr=0.05)}
    names = {
        "scheduler": SCHEDULERS | BY_METRIC,
        "optimizer": plain,
        "model": NORMED,
        "transform": {"noisy": noisy, "nested": nested},
        "loss": {"nested": nested_loss},
        "metrics": METRICS,
    }
    given = {key: fields[key] for key in names if isinstance(fields.get(key), str)}
    fields = fields | {key: names[key][name] for key, name in given.items() if name in names[key]}
    fields |= {"data": DATA[fields["data"]]()} if fields.get("data") in DATA else {}
    return fields | BY_TURNS if "step" in fields else fields


def make_job(**changes):
    return mt.Job(
        **{
            "model": perceptron,
            "loss": square_loss,
            "optimizer": sgd,
            "data": Memory(),
            "epochs": 2,
            "batch_size": 6,
        }
        | changes
    )


def clip(job, module):
    """As people do it in torch."""
    if job.clip_norm is not None:
        nn.utils.clip_grad_norm_(module.parameters(), job.clip_norm)
    if job.clip_value is not None:
        nn.utils.clip_grad_value_(module.parameters(), job.clip_value)


def serial(job, worker=0, on_step=lambda module: None):
    """What one process makes of the job: the same leases, the same randomness as that worker's, torch's own loop."""
    torch.manual_seed(job.seed)
    module = job.model()
    optimizer = build_optimizer(job, module, None)
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    reader = job.data.reader(None, job.seed)
    step = 0
    for epoch in range(job.epochs):
        for start in range(0, job.data.num_samples, job.batch_size):
            seed_step(job.seed, worker, step)
            optimizer.zero_grad(set_to_none=True)
            batch = reader.batch(epoch, start, min(job.batch_size, job.data.num_samples - start))
            read_loss(job.loss(module, batch)).mean.backward()
            clip(job, module)
            optimizer.step()
            if scheduler is not None and not isinstance(job.scheduler, PerEpoch):
                scheduler.step()
            on_step(module)
            step += 1
        if isinstance(job.scheduler, PerEpoch):
            scheduler.step()
    return module.state_dict()


def serial_ema(job, decay):
    """The last model of `serial`, and torch's moving average of its weights."""
    averaged = []

    def follow(module):
        if not averaged:
            averaged.append(AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay)))
        averaged[0].update_parameters(module)

    last = serial(job, on_step=follow)
    return last, averaged[0].module.state_dict()


def linear_float64():
    """y = x w with dyadic weights: three steps of squared loss stay exact in float64."""
    module = nn.Linear(5, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(torch.arange(5) / 16.0)
    return module


def square_loss_float64(model, batch):
    return ((model(batch["x"].double()) - batch["y"].double()) ** 2).mean()


def linear_float32():
    module = nn.Linear(5, 4)
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) / 16.0 - index / 8.0)
    return module


def linear_loss(model, batch):
    """Linear in the parameters: gradients are means of dyadic numbers, however far the parameters have
    gone.
    """
    return model(batch["x"]).mean()


LINEAR_BFLOAT16 = {
    "model": lambda: linear_float32().bfloat16(),
    "loss": lambda model, batch: linear_loss(model, {"x": batch["x"].bfloat16()}),
}


def dyadic_sgd(parameters):
    return torch.optim.SGD(parameters, lr=2.0**-4, momentum=0.5)


def _weights(batch):
    """Few samples of each batch count, and not equally many."""
    return (batch["x"][:, 0] > 0.4).float() * (1 + (batch["x"][:, 1] > 0).float())


def weighted_loss(model, batch):
    """As class weights and `ignore_index` do: a sum, and what to divide it by."""
    weights = _weights(batch)
    return (weights * ((model(batch["x"]) - batch["y"]) ** 2).squeeze(1)).sum(), weights.sum()


def own_weighted_loss(model, batch):
    """The same, divided by each rank for itself."""
    total, weight = weighted_loss(model, batch)
    return total / weight.clamp_min(1.0)


def nothing(model, batch):
    """Metrics of a job's own."""
    return {"nothing": 0.0}


def smooth():
    """Without dropout, so that the batch of several ranks is one rank's."""
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


WEIGHTED = {"model": smooth, "loss": weighted_loss, "epochs": 2, "data": Memory(52)}


DYADIC = {
    "quadratic in float64": {"model": linear_float64, "loss": square_loss_float64, "optimizer": dyadic_sgd},
    "linear in float32": {"model": linear_float32, "loss": linear_loss, "optimizer": dyadic_sgd},
}  # fmt: skip
