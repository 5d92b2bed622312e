"""What workers hold each for itself comes back with a resume: momenta, moments, buffers that train, rounding."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mpitrain as mt
from mpitrain.checkpoint.parts import listed
from mpitrain.model.trained_buffers import trained_buffers
from mpitrain.training.measure import same_model
from mpitrain.values import parse
from tests import toy


class Queue(nn.Module):
    """Remembers the batches that it has seen, and what it makes of the next one depends on them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 1))
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.seen.mul_(0.9).add_(x.mean(0))
        return self.head(self.norm(x) + self.seen)


def normed():
    return nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 1))


def train(path, strategy, threads=3, model=Queue, **options):
    job = toy.make_job(model=model, optimizer=toy.adam, data=toy.Memory(48), epochs=3, checkpoint_every="1")
    return mt.train(
        job, parse(strategy, "strategy"), threads=threads, run_dir=str(path), quiet=True, **options
    )


def parts_of(path):
    names = {one.name for one in listed(path)[0].rglob("*.json")}
    return sorted(name.removesuffix(".json") for name in names)


@pytest.mark.parametrize(
    ("strategy", "parts"),
    [
        ("sync()", ["shard-0", "worker-0", "worker-1", "worker-2"]),
        ("sync(servers=2)", ["shard-0", "shard-1", "worker-0", "worker-1", "worker-2"]),
        ("localsgd(period=2)", ["own-1", "own-2", "shard-0"]),
        ('localsgd(period=2,wire="int8")', ["own-1", "own-2", "shard-0"]),
    ],
)
def test_a_resume_is_bit_for_bit_where_workers_hold_something_of_their_own(strategy, parts, tmp_path):
    whole = train(tmp_path / "whole", strategy)
    # the fifth step of local SGD ends between two averagings: its run goes on from the one before
    train(tmp_path / "halves", strategy, steps=5)
    again = train(tmp_path / "halves", strategy, resume="auto")
    assert again["resumed_from"] and parts_of(tmp_path / "halves") == parts
    assert same_model(whole["model"], again["model"])


def test_running_statistics_stay_those_of_the_validator(tmp_path):
    assert trained_buffers(normed()) == [] and "seen" in trained_buffers(Queue())
    train(tmp_path, "sync()", model=normed, steps=2)
    assert parts_of(tmp_path) == ["shard-0", "worker-0"]


@pytest.mark.parametrize(
    ("strategy", "steps"), [("localsgd(period=2)", 4), ('localsgd(period=2,wire="int8")', 4), ("sync()", 3)]
)
def test_another_number_of_workers_goes_on_from_what_there_is(strategy, steps, tmp_path):
    model = Queue if strategy == "sync()" else toy.smooth  # BatchNorm wants two samples of every worker
    train(tmp_path, strategy, model=model, steps=steps)
    for threads in (2, 4):
        result = train(tmp_path, strategy, threads, model, resume="auto", steps=steps + threads)
        assert result["status"] == "ok" and result["leg_samples"]
        assert all(bool(one.isfinite().all()) for one in load_file(result["model"]).values())


def test_a_checkpoint_of_the_first_workers_momenta_alone_says_so(tmp_path, monkeypatch):
    """As those were before every worker wrote its own."""
    from mpitrain.training.local_sgd import trainer

    before = trainer.LocalSGDTrainer._make_checkpoints
    monkeypatch.setattr(
        trainer.LocalSGDTrainer,
        "_make_checkpoints",
        super(trainer.LocalSGDTrainer, trainer.LocalSGDTrainer)._make_checkpoints,
    )
    train(tmp_path, "localsgd(period=2)", steps=4)
    monkeypatch.setattr(trainer.LocalSGDTrainer, "_make_checkpoints", before)
    assert parts_of(tmp_path) == ["shard-0"]
    train(tmp_path, "localsgd(period=2)", resume="auto")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows if row["event"] == "momenta"] == [
        "the checkpoint holds the first worker's alone: the others begin with them"
    ]
