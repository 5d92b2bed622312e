"""What workers hold each for itself comes back with a resume: momenta, moments, buffers that train, rounding."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mpitrain as mt
from mpitrain.checkpoint.parts import listed, newest
from mpitrain.model import Replica
from mpitrain.model.gradient.trained_buffers import trained_buffers
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


ELASTIC = "elastic(push_every=2,servers=2,moving_rate=0.5,push_wire='bfloat16',reply_wire='bfloat16')"


def train_elastic(path, threads=1, epochs=3, steps=None, **options):
    """Three exchanges an epoch, the last of a single batch, with moments, dropout and a rate that falls."""
    job = toy.make_job(
        model=toy.perceptron, optimizer=toy.adam, data=toy.Memory(30), epochs=epochs, checkpoint_every="1",
        strategy=parse(ELASTIC, "strategy"), schedule=mt.Decay(every=1, by=0.5),
    )  # fmt: skip
    return mt.train(job, threads=threads, run_dir=str(path), quiet=True, steps=steps, **options)


def test_an_elastic_worker_goes_on_with_parameters_of_its_own(tmp_path):
    """From the middle of a run, and from its end, where the validator's model was the centre by then."""
    whole = train_elastic(tmp_path / "whole")
    train_elastic(tmp_path / "halves", steps=7)
    middle = train_elastic(tmp_path / "halves", resume="auto")
    train_elastic(tmp_path / "epochs", epochs=2)
    end = train_elastic(tmp_path / "epochs", resume="auto")
    for again in (middle, end):
        assert again["resumed_from"] and same_model(whole["model"], again["model"])
    found = newest(tmp_path / "epochs")
    own, centre = (
        found.part("worker-0")["replica"]["parameters"],
        found.part("shard-0")["store"]["parameters"],
    )
    assert not torch.equal(own[: len(centre)], centre)


def test_elastic_workers_without_parameters_of_their_own_begin_at_the_centre(tmp_path, monkeypatch):
    """Newcomers, and all where a checkpoint is of before these were written, which is said."""
    loaded = []
    load = Replica.load

    def watched(self, shard, payload):
        centre = payload.body.clone()
        load(self, shard, payload)
        loaded.append(
            (
                self.own_gradients.worker,
                torch.equal(self.model.current()[shard].body, centre.to(self.model.layout.dtype)),
            )
        )

    monkeypatch.setattr(Replica, "load", watched)

    def resumed(threads):
        """For each worker, whether its first read after the resume has set it to the centre."""
        loaded.clear()
        train_elastic(tmp_path, threads, epochs=1 + threads, resume="auto")
        return dict(reversed(loaded))

    def said():
        rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        return [row["text"] for row in rows if row["event"] == "own parameters"]

    state = Replica.state
    with monkeypatch.context() as before:
        before.setattr(
            Replica,
            "state",
            lambda self: {key: value for key, value in state(self).items() if key != "parameters"},
        )
        train_elastic(tmp_path, epochs=1)
    assert resumed(1) == {0: True}
    assert said() == ["the checkpoint holds none of the workers: all begin at the centre"]
    assert resumed(2) == {0: False, 1: True} and len(said()) == 1


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
