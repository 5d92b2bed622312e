"""What a job's functions make: a mistake is told in the job's words, and what is right passes unchanged."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpitrain.errors import UsageError
from mpitrain.job import Overrides, apply_overrides, load_job
from mpitrain.model.user_code import Checked, check_made_optimizer, check_module, unused_parameters
from mpitrain.training.options import fingerprint
from tests import toy

BATCH = {"x": torch.ones(3, 5), "y": torch.ones(3, 1)}
MODEL = nn.Linear(5, 1)


def loss_of(function):
    return Checked(function, "loss")(MODEL, BATCH)


def test_a_loss_that_is_right_is_handed_on_as_it_is():
    value = MODEL(BATCH["x"]).mean()
    assert loss_of(lambda model, batch: value) is value
    with torch.no_grad():  # in validation nothing has a gradient
        assert not loss_of(toy.square_loss).requires_grad
    assert loss_of(lambda model, batch: model(batch["x"]).sum().view(1)).shape == (1,)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda model, batch: model(batch["image"]).mean(), r"asks for 'image' \(.*test_user_code.py, line \d+\)"),
        (lambda model, batch: model(batch["image"]).mean(), "a batch holds 'x', 'y'"),
        (lambda model, batch: model(batch["x"]), r"shape \(3, 1\); return its mean"),
        (lambda model, batch: model(batch["x"]).mean().item(), "got float; return the mean .* without .item()"),
        (lambda model, batch: model(batch["x"]).mean().detach(), "does not depend on any parameter"),
    ],
)  # fmt: skip
def test_a_loss_that_is_wrong_is_told_with_the_way_out(function, text):
    with pytest.raises(UsageError, match=text):
        loss_of(function)


def test_a_key_error_of_the_losss_own_dicts_stays_what_it_is():
    for key in ("x", 3):
        with pytest.raises(KeyError):
            loss_of(lambda model, batch, key=key: {}[key])


def test_checking_a_loss_does_not_hide_whose_it_is():
    assert fingerprint(Checked(toy.square_loss, "loss")) == fingerprint(toy.square_loss)
    job = apply_overrides(apply_overrides(toy.make_job(), Overrides()), Overrides())
    assert job.loss.function is toy.square_loss


@pytest.mark.parametrize("sparse", [nn.Embedding(4, 2, sparse=True), nn.EmbeddingBag(4, 2, sparse=True)])
def test_a_layer_with_sparse_gradients_is_refused_by_name(sparse):
    with pytest.raises(UsageError, match=r"layer 'inner.1' is Embedding.*sparse=True"):
        check_module(nn.ModuleDict({"inner": nn.Sequential(nn.Linear(2, 2), sparse)}))
    dense = nn.Embedding(4, 2)
    assert check_module(dense) is dense


def test_what_is_no_module_and_no_optimizer_is_refused():
    with pytest.raises(UsageError, match=r"must make a torch.nn.Module, got dict"):
        check_module({})
    one = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    assert check_made_optimizer(one) is one
    with pytest.raises(UsageError, match="got a list of 2; one optimizer may have several parameter groups"):
        check_made_optimizer([one, one])
    with pytest.raises(UsageError, match="got NoneType"):
        check_made_optimizer(None)


@pytest.mark.parametrize("key", ["data", "validate", "synthetic"])
def test_a_dataset_is_no_source(key):
    dataset = torch.utils.data.TensorDataset(BATCH["x"])
    with pytest.raises(
        UsageError, match=rf"{key} must be mpitrain.Shards.* got torch's TensorDataset.*mpitrain.pack"
    ):
        toy.make_job(**{key: dataset})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("x = (1,\n", "job.py, line 1: '.' was never closed: x = .1,"),
        ("import mpitrain as mt\njob = mt.Job(epoch=3)\n", "line 2: Job has no field 'epoch'; did you mean 'epochs'"),
        ("import mpitrain as mt\njob = mt.Job(epochs=3)\n", "line 2: Job.* missing 4 required .*'model', 'loss'"),
    ],
)  # fmt: skip
def test_a_job_file_that_cannot_be_read_is_told_with_its_line(tmp_path, source, text):
    path = tmp_path / "job.py"
    path.write_text(source)
    with pytest.raises(UsageError, match=text):
        load_job(str(path))


def test_an_error_of_the_job_files_own_stays_what_it_is(tmp_path):
    path = tmp_path / "job.py"
    path.write_text("sum(3)\n")
    with pytest.raises(TypeError, match="not iterable"):
        load_job(str(path))


def test_unused_parameters_are_found_by_the_graph():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    model["c"].bias.requires_grad_(False)
    x = torch.ones(1, 2)
    assert unused_parameters(model, model["a"](x).sum()) == ["b.weight", "b.bias", "c.weight"]
    assert unused_parameters(model, sum(model[name](x).sum() for name in "abc")) == []
    hidden = checkpoint(model["a"], x.requires_grad_(), use_reentrant=True).sum()
    assert unused_parameters(model, hidden) == []  # the graph ends at the checkpoint: nobody knows
    told = checkpoint(model["a"], x, use_reentrant=False).sum()
    assert unused_parameters(model, told) == ["b.weight", "b.bias", "c.weight"]
