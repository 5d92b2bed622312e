"""All ranks go back to what they last held alike when a bit has flipped, and end in the bits of an undisturbed run."""

import json

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.errors import AgreedError, UsageError
from mpitrain.inject import Flip, read
from mpitrain.training.synchronous.flips import flip_bit
from mpitrain.values import parse
from tests import toy

EPOCHS = 5  # of six steps of two workers


def train(path, *orders, strategy="allreduce()", job=None, **options):
    job = job or toy.make_job(
        model=toy.linear_float32, loss=toy.linear_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        batch_size=4, epochs=EPOCHS, validate=toy.Memory(12),
    )  # fmt: skip
    options = {"threads": 2, "quiet": True} | options
    return mt.train(job, parse(strategy, "strategy"), run_dir=str(path), inject=orders, **options)


def events(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def weights(path):
    return load_file(path / "model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    path = tmp_path_factory.mktemp("undisturbed")
    train(path)
    return path


@pytest.mark.parametrize(
    ("order", "redone"),  # compared after 1, 2, 3, 6, 10, 14 steps and so on, and after each epoch of 6
    [
        ("flip(worker=1,at_step=4,bit=30)", 3),  # a number that is not finite any more, and so a gradient
        ("flip(worker=0,at_step=8,tensor=1)", 4),  # the last digit
        ("flip(worker=1,at_step=29,bit=22)", 0),  # after the last step
        ("flip(worker=0,at_step=13,what='optimizer',bit=22)", 4),
    ],
)
def test_a_flip_is_undone(order, redone, undisturbed, tmp_path):
    result = train(tmp_path, order, go_back=True, compare_every=4)
    went = result["went_back"]
    assert went["times"] == 1 and went["redone_steps"] == redone
    same = [torch.equal(one, weights(tmp_path)[name]) for name, one in weights(undisturbed).items()]
    assert all(same) and result["steps"] == 6 * EPOCHS and result["status"] == "ok"
    rows, plain = (
        [row for row in events(path) if row["event"] == "validation"] for path in (tmp_path, undisturbed)
    )
    assert [(row["epoch"], row["validation_loss"]) for row in rows] == [
        (row["epoch"], row["validation_loss"]) for row in plain
    ]
    [told] = [row for row in events(tmp_path) if row["event"] == "went back"]
    assert "is no longer that of rank 0" in told["reason"] and told["redone_steps"] == went["redone_steps"]


def test_without_going_back_a_flip_ends_the_run(tmp_path):
    with pytest.raises(AgreedError, match=r"after step 9, 'weight' of rank 1 .* last agreed after step 7\)"):
        train(tmp_path, "flip(worker=1,at_step=6,bit=22)", compare_every=2)


def test_several_flips_are_each_undone(undisturbed, tmp_path):
    orders = [f"flip(worker={step % 2},at_step={step},bit={step})" for step in (3, 9, 10, 20)]
    assert train(tmp_path, *orders, go_back=True, compare_every=1)["went_back"] == {
        "times": 4,
        "redone_steps": 4,
    }
    assert all(torch.equal(one, weights(tmp_path)[name]) for name, one in weights(undisturbed).items())


def parts_by_batch(model, batch):
    with torch.no_grad():
        model.weight.mul_(1 + batch["x"].mean())
    return toy.linear_loss(model, batch)


def test_what_comes_again_each_time_ends_the_run(tmp_path):
    job = toy.make_job(
        model=toy.linear_float32, loss=parts_by_batch, optimizer=toy.dyadic_sgd, batch_size=4, epochs=1
    )
    with pytest.raises(AgreedError, match="gone back to step 0 3 times, and this came again each time"):
        train(tmp_path, job=job, go_back=True)


def test_a_scheduler_that_goes_by_validations_goes_on_as_if_nothing_had_been(tmp_path):
    job = toy.make_job(
        model=toy.linear_float32, loss=toy.linear_loss, optimizer=toy.dyadic_sgd, batch_size=4, epochs=EPOCHS,
        validate=toy.Memory(12), scheduler=toy.BY_METRIC["no better"], metrics=lambda m, b: {"one": 9.0}, ema=0.5,
    )  # fmt: skip
    train(tmp_path / "plain", job=job)
    # found at the end of an epoch, before its validation, and after it
    orders = [f"flip(worker=1,at_step={step},bit=22)" for step in (10, 17)]
    result = train(tmp_path / "flipped", *orders, job=job, go_back=True, compare_every=5)
    assert result["went_back"]["times"] == 2
    for name in ("model.safetensors", "model-ema.safetensors"):
        plain, flipped = (load_file(tmp_path / kind / name) for kind in ("plain", "flipped"))
        assert all(torch.equal(plain[key], flipped[key]) for key in plain)


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        ("async()", {"go_back": True}, "--go-back, --compare-every: no two workers"),
        ("decentralized()", {"compare_every": 3}, "--go-back, --compare-every: no two workers"),
        ("allreduce()", {"checksums": True}, "--checksums with --threads"),
    ],
)
def test_what_cannot_be_is_refused(strategy, options, words, tmp_path):
    with pytest.raises(UsageError, match=words):
        train(tmp_path, strategy=strategy, **options)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("flip(worker=0, at_step=1, what='payload')", "handed over where they are"),
        ("flip(worker=0, at_step=1, what='gradient')", "payload"),
        ("flip(worker=0, at_step=1, bit=-1)", "counts from 0"),
        ("flip(worker=7, at_step=1)", "there is no worker 7"),
    ],
)
def test_a_flip_that_cannot_be_is_refused(order, words, tmp_path):
    with pytest.raises((UsageError, AgreedError), match=words):
        train(tmp_path, order)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float64])
def test_one_bit_flips_wherever_a_tensor_lies(dtype):
    for tensor in (
        torch.ones(6, 5, dtype=dtype).t(),
        torch.ones(7, dtype=dtype)[1:],
        torch.ones((), dtype=dtype),
    ):
        num_bits = 8 * tensor.nbytes
        for bit in (0, num_bits - 1, num_bits // 2 + 1):
            before, version = tensor.clone(), tensor._version
            flip_bit(tensor, bit)
            assert (tensor != before).sum() == 1 and tensor._version == version
            flip_bit(tensor, bit + num_bits)
            assert torch.equal(tensor, before)


def test_an_order_reads_as_it_prints():
    [flip] = read(["flip(worker=1, at_step=2, what='optimizer', tensor=3, bit=4)"])
    assert flip == Flip(1, 2, "optimizer", 3, 4) and read([str(flip)]) == (flip,)
