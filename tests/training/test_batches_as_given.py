"""Jobs whose batches are tuples, named tuples, nests or one tensor: in threads and in virtual time, with transforms,
metrics, validation and predictions they give what the same samples give by name, to the bit."""

import collections

import h5py
import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.values import parse
from tests import toy

Sample = collections.namedtuple("Sample", ["image", "label"])
DATASET = toy.dataset(24)
# how a sample looks, and how a function of (x, y) takes it from a batch
SHAPES = {
    "dict": (lambda x, y: {"x": x, "y": y}, lambda b: (b["x"], b["y"])),
    "pair": (lambda x, y: (x, y), lambda b: b),
    "pair by name": (lambda x, y: [x, y], lambda b: [b[name] for name in b.keys()]),  # noqa: SIM118
    "three": (lambda x, y: ("a text", x, y), lambda b: b[1:]),
    "named": (Sample, lambda b: (b.image, b.label)),
    "nest": (lambda x, y: ({"x": [x, x]}, Sample(y, "text")), lambda b: (b[0]["x"][1], b[1].image)),
    "one tensor": (lambda x, y: torch.cat([x, y]), lambda b: (b[:, :5].clone(), b[:, 5:].clone())),
}


class Shaped(torch.utils.data.Dataset):
    def __init__(self, shape):
        self.shape = shape

    def __len__(self):
        return len(DATASET)

    def __getitem__(self, index):
        return SHAPES[self.shape][0](*DATASET[index])


def job_of(shape):
    take = SHAPES[shape][1]

    def applied(function):
        def of_batch(model, batch):
            x, y = take(batch)
            return function(model, {"x": x, "y": y})

        return of_batch

    return toy.make_job(
        data=Shaped(shape),
        validate=Shaped(shape),
        loss=applied(toy.square_loss),
        metrics=[
            applied(lambda model, batch: {"distance": (model(batch["x"]) - batch["y"]).abs().mean()}),
            mt.Collected(
                lambda found, right: {"most": (found - right).abs().max()},
                outputs=applied(lambda model, batch: (model(batch["x"]), batch["y"])),
            ),
        ],
        predict=applied(lambda model, batch: model(batch["x"])),
        transform=lambda batch, random: batch,
    )


def run(shape, world, path):
    job, options = job_of(shape), {"run_dir": str(path), "quiet": True}
    if world == "virtual":
        return job, mt.simulate(job, parse("async()", "strategy"), workers=3, **options)
    return job, mt.train(job, parse(world, "strategy"), threads=2, **options)


@pytest.mark.parametrize("world", ["allreduce()", "sync()", "virtual"])
def test_whatever_a_batch_is_the_run_is_the_same_to_the_bit(world, tmp_path):
    _, expected = run("dict", world, tmp_path / "dict")
    assert set(expected["metrics"]) == {"validation_loss", "distance", "most"}
    for shape in SHAPES:
        job, found = run(shape, world, tmp_path / shape)
        assert found["metrics"] == expected["metrics"], shape
        weights, others = (load_file(tmp_path / one / "model.safetensors") for one in (shape, "dict"))
        assert all(torch.equal(weights[name], others[name]) for name in others), shape
        if world == "allreduce()":
            mt.predict(tmp_path / shape, job.data, tmp_path / f"{shape}.h5", job=job)
            with h5py.File(tmp_path / f"{shape}.h5") as one, h5py.File(tmp_path / "dict.h5") as other:
                assert (one["prediction"][:] == other["prediction"][:]).all(), shape


def test_batches_whose_samples_cannot_be_counted_weigh_as_many_as_they_have(tmp_path):
    """Lists of what each sample has, as detectors are trained on; the last batch of a validation is smaller."""

    def listed(items):
        return tuple(zip(*((x, {"y": y}) for x, y in items), strict=True))

    def loss(model, batch):
        images, targets = batch
        return toy.square_loss(
            model, {"x": torch.stack(images), "y": torch.stack([one["y"] for one in targets])}
        )

    plain = toy.make_job(data=toy.dataset(24), validate=toy.dataset(300))
    data = {
        key: mt.Samples(toy.dataset(number), collate_fn=listed)
        for key, number in (("data", 24), ("validate", 300))
    }
    found = [
        mt.train(job, threads=1, run_dir=str(tmp_path / str(number)), quiet=True)["metrics"]
        for number, job in enumerate((plain, toy.make_job(loss=loss, **data)))
    ]
    assert found[0] == found[1] and "validation_loss" in found[0]


@pytest.mark.parametrize(
    ("shape", "loss", "text"),
    [
        (
            "dict",
            lambda model, batch: model(batch[0]).mean(),
            r"Job: loss: KeyError: 0 .*x, y = batch.values\(\)",
        ),
        (
            "three",
            lambda model, batch: model(batch["x"]).mean(),
            "Job: loss: TypeError.*a tuple of 3 without names",
        ),
    ],
)
def test_a_run_says_what_its_batches_hold(shape, loss, text, tmp_path):
    with pytest.raises(UsageError, match=text):
        mt.train(
            toy.make_job(data=Shaped(shape), loss=loss), threads=1, run_dir=str(tmp_path / "run"), quiet=True
        )


def test_what_a_model_takes_is_asked_for_in_the_words_of_the_batch(tmp_path):
    for shape, text in (("three", r"model\(batch\[0\]\)"), ("named", r"model\(batch.image\)")):
        job = toy.make_job(data=Shaped(shape), loss=job_of(shape).loss)
        mt.train(job, threads=1, run_dir=str(tmp_path / shape), quiet=True)
        with pytest.raises(UsageError, match=text):
            mt.predict(tmp_path / shape, Shaped(shape), tmp_path / "out.h5", job=job)
