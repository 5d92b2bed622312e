"""Jobs that are split over ranks in tests, what one process makes of them, and which runs there are."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import nn

import mpitrain as mt
from mpitrain.data.sources import load_source
from mpitrain.data.write.pack import PackOptions, pack
from mpitrain.model.gradient.loss import read_loss
from mpitrain.model.recipe import seed_step
from mpitrain.training.job_file import load_job
from tests import toy

ROOT = Path(__file__).resolve().parents[2]
BATCH = 12


class Deep(nn.Module):
    """No nn.Sequential; float64."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 1)
        self.body = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 8)])
        self.norm = nn.LayerNorm(16)
        self.double()

    def forward(self, x):
        return self.last(self.body[1](torch.tanh(self.norm(self.body[0](torch.tanh(self.first(x)))))))


def two_halves(model, count):
    return [
        nn.Sequential(model.first, nn.Tanh(), model.body[0]),
        nn.Sequential(model.norm, nn.Tanh(), model.body[1], model.last),
    ]


def loss(model, batch):
    return ((model(batch["x"].double()) - batch["y"].double()) ** 2).mean()


def weighted_loss(model, batch):
    """(sum, weight); some samples count for nothing."""
    weights = batch["x"][:, 0].double().abs()
    return (
        weights * ((model(batch["x"].double()) - batch["y"].double()) ** 2).squeeze(1)
    ).sum(), weights.sum()


HAS_MUON = hasattr(torch.optim, "Muon")  # from torch 2.9 on


def muon(parameters):
    """torch's, of the matrices among them."""
    return torch.optim.Muon([one for one in parameters if one.ndim == 2], lr=0.01)


def deep_job():
    plan = {"body.0": "gather", "body.1": "column", "last": "row"}
    return toy.make_job(
        model=Deep, loss=loss, optimizer=toy.sgd, batch_size=BATCH, epochs=2, validate=toy.Memory(),
        stages=two_halves, tensor_plan=plan, data=toy.Memory(num_samples=31),
    )  # fmt: skip


def normed():
    """Batch statistics, which a look at shapes must not touch."""
    layers = [nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1)]
    return nn.Sequential(*layers).double()


def chain():
    layers = [nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)]
    return nn.Sequential(*layers).double()


def character_job(directory):
    """jobs/charnn.py in float64, on what `pack_some_topics` has packed."""
    job = load_job(str(ROOT / "jobs" / "charnn.py"))
    shards = [mt.Shards(f"{directory}/topics/{kind}-*.h5") for kind in ("train", "validate")]
    return dataclasses.replace(
        job, model=lambda: job.model().double(), data=shards[0], validate=shards[1], epochs=1, target={}
    )


def small_character_job(directory, **changes):
    """jobs/charnn.py in float32 with two narrow layers."""
    layer = load_job(str(ROOT / "jobs" / "charnn.py")).model.__globals__["Recurrent"]

    def model():
        layers = [layer(64, 64, batch_first=True) for _ in range(2)]
        return nn.Sequential(nn.Embedding(128, 64), *layers, nn.Linear(64, 128))

    return dataclasses.replace(character_job(directory), model=model, epochs=3, batch_size=8, **changes)


def pack_some_topics(directory):
    arrays = {name: array[:180] for name, array in load_source("topics").items()}
    pack(arrays, Path(directory) / "topics", PackOptions(0.2, None, None, 0), source="topics")


def serial(job, num_pieces, rank=0):
    """What one process makes of a job whose batches are cut into pieces: (state_dict, validation loss)."""
    torch.manual_seed(job.seed)
    module = job.model()
    optimizer = job.optimizer(module.parameters())
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    by_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    catalogue = job.data.scan()
    reader, step = job.data.reader(catalogue, job.seed), 0
    for epoch in range(job.epochs):
        for start in range(0, catalogue.num_samples, job.batch_size):
            count = min(job.batch_size, catalogue.num_samples - start)
            if count < job.batch_size and job.drop_last:
                continue
            pieces = num_pieces if count == job.batch_size else 1
            batch = reader.batch(epoch, start, count)
            seed_step(job.seed, rank, step)
            optimizer.zero_grad(set_to_none=True)
            for index in range(pieces):
                piece = {name: t.chunk(pieces)[index] for name, t in batch.items()}
                read_loss(job.loss(module, piece)).mean.backward()
            for parameter in module.parameters():
                parameter.grad.div_(pieces)
            toy.clip(job, module)
            optimizer.step()
            if scheduler is not None and not by_metric:
                scheduler.step()
            step += 1
        if by_metric:
            scheduler.step(_validation_loss(job, module))
    return module.state_dict(), _validation_loss(job, module)


def _validation_loss(job, module):
    module.eval()
    with torch.no_grad():
        (batch,) = job.validate.reader(job.validate.scan(), job.seed).sequential(256)
        loss = read_loss(job.loss(module, batch)).mean.item()
    module.train()
    return loss


changed = dataclasses.replace
P, T, S = mt.Pipeline, mt.TensorParallel, mt.Sharded
EVERY_BATCH = {"checkpoint_every": "1", "keep_checkpoints": 99}
CUT = {"optimizer": toy.adam, **EVERY_BATCH}
# ranks -> name -> (strategy, what differs from the job)
RUNS = {
    2: {
        "charnn-1f1b": (P(microbatches=4), {}),
        "charnn-gpipe": (P(microbatches=4, schedule="gpipe"), {}),
        "deep-1f1b": (P(microbatches=3), {}),
        "deep-tensor": (T(), {}),
        "deep-sharded": (S(), {"batch_size": BATCH // 2}),
        "normed": (P(microbatches=2), {"model": normed, "stages": None, "drop_last": True}),
        "nan-pipeline": (P(microbatches=3), {"loss": "nan"}),
        "nan-sharded": (S(), {"loss": "nan"}),
        "skip-pipeline": (P(microbatches=3), {"loss": "nan", "on_nonfinite": "skip"}),
        "signal-pipeline": (P(microbatches=3), {"loss": "signal"}),
        "adam-1f1b": (P(microbatches=3), CUT),
        "adam-tensor": (T(), CUT),
        "adam-sharded": (S(), {"batch_size": BATCH // 2, **CUT}),
        "three-stages": (P(stages=3), {}),
        "uneven-batch": (P(microbatches=5), {}),
        "no-stages": (P(microbatches=3), {"stages": None}),
        "no-plan": (T(), {"tensor_plan": {}}),
        "wrong-plan": (T(), {"tensor_plan": {"layers.*": "row"}}),
        "odd-plan": (T(), {"tensor_plan": {"first": "row"}}),
        **({"muon-sharded": (S(), {"batch_size": BATCH // 2, "optimizer": muon})} if HAS_MUON else {}),
        "norm-plan": (T(), {"tensor_plan": {"norm": "row"}}),
    },
    4: {
        "deep-pipeline": (P(microbatches=3), {"batch_size": BATCH // 2, **EVERY_BATCH}),
        "deep-tensor": (T(), {"batch_size": BATCH // 2, **CUT}),
        "deep-sharded": (S(), {"batch_size": BATCH // 4}),
        "deep-replicas": (S(replicas=2), {"batch_size": BATCH // 4, **CUT}),
        "chain-by-names": (P(stages=4), {"model": chain, "stages": ("0", "1", "2", "3", "4")}),
    },
}
# what is trained again from one of its first checkpoints, and what goes on where it was interrupted
RESUMED = {
    2: ("adam-1f1b", "adam-tensor", "adam-sharded"),
    4: ("deep-tensor", "deep-replicas"),
}
INTERRUPTED = {2: ("signal-pipeline",), 4: ()}
