"""What a job's functions make: a mistake is told in the job's words, and what is right passes unchanged."""

import functools
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpitrain.errors import UsageError
from mpitrain.job import Overrides, apply_overrides
from mpitrain.model.gradient.user_code import Checked, check_made_optimizer, check_module, unused_parameters
from mpitrain.system.tracebacks import frames, own_part, shortened
from mpitrain.training.job_file import load_job
from mpitrain.training.resuming.fingerprint import fingerprint
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
        (lambda model, batch: (model(batch["x"]).sum(), "y"), "the weight is no number but 'y': it is what the sum"),
        (lambda model, batch: (model(batch["x"]).sum(), batch["y"]), r"no number but a tensor of shape \(3, 1\)"),
    ],
)  # fmt: skip
def test_a_loss_that_is_wrong_is_told_with_the_way_out(function, text):
    with pytest.raises(UsageError, match=text):
        loss_of(function)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(()), 'metrics must return a dict such as .*"accuracy".* got Tensor'),
        ({"accuracy": torch.ones(3)}, r"metric 'accuracy' must be one number, .* got Tensor of shape \(3,\)"),
        ({"accuracy": "good"}, "metric 'accuracy' must be one number, .* got str"),
    ],
)
def test_metrics_that_are_no_numbers_by_name_are_told_with_the_way_out(value, text):
    with pytest.raises(UsageError, match=text):
        Checked(lambda model, batch: value, "metrics")(MODEL, BATCH)
    right = {"a": torch.ones(()), "b": 0.5, "c": torch.ones(1)}
    assert Checked(lambda model, batch: right, "metrics")(MODEL, BATCH) is right


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"loss": lambda batch: 0},
            r"loss is called with .model, batch., which <lambda>.batch. does not allow .too",
        ),
        (
            {"model": nn.Linear},
            "model is called without arguments, which Linear.*'in_features'.*`lambda: Net",
        ),
        ({"model": "resnet"}, "model must be a function, such as .* got 'resnet'"),
        ({"optimizer": torch.optim.SGD(MODEL.parameters())}, "got an optimizer that is made already"),
        ({"optimizer": lambda: None}, "optimizer is called with .parameters., which"),
        ({"metrics": 3}, "metrics must be a function, such as .* got 3"),
        ({"strategy": "async()"}, "got 'async..'; a text is for --strategy"),
        ({"target": ["accuracy>0.9"]}, "target must be a dict such as"),
        ({"tensor_plan": ["up"]}, "tensor_plan must be a dict such as"),
    ],
)
def test_a_field_of_the_wrong_kind_is_told_when_the_job_is_made(fields, text):
    with pytest.raises(UsageError, match=text):
        toy.make_job(**fields)


def test_functions_with_more_arguments_and_of_other_kinds_are_a_jobs_too():
    toy.make_job(loss=lambda *both, scale=1: 0, model=lambda width=3: MODEL, optimizer=torch.optim.SGD)
    toy.make_job(model=MODEL, optimizer=functools.partial(torch.optim.Adam, lr=0.1), metrics=None)


def test_to_resume_a_run_needs_its_directory(monkeypatch):
    monkeypatch.delenv("MPITRAIN_RUN_DIR", raising=False)
    with pytest.raises(UsageError, match="none is given, so every start has a new one; say --run-dir DIR"):
        Overrides(resume="auto").check()
    Overrides(resume="auto", run_dir="a").check()
    Overrides(resume="a").check()
    monkeypatch.setenv("MPITRAIN_RUN_DIR", "a")  # the launch has chosen one, and starts the run again
    Overrides(resume="auto").check()


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(UsageError, match="Linear has no parameter to train: requires_grad is False"):
        check_module(nn.Linear(2, 2).requires_grad_(False))


def test_a_key_error_of_the_losss_own_dicts_stays_what_it_is():
    for key in ("x", 3):
        with pytest.raises(KeyError):
            loss_of(lambda model, batch, key=key: {}[key])


def test_checking_a_loss_does_not_hide_whose_it_is():
    assert fingerprint(Checked(toy.square_loss, "loss")) == fingerprint(toy.square_loss)
    job = apply_overrides(apply_overrides(toy.make_job(), Overrides()), Overrides())
    assert job.loss.function is toy.square_loss


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
def test_an_iterator_is_no_source(key):
    with pytest.raises(
        UsageError, match=rf"{key} must be mpitrain.Shards.* got builtins's list_iterator.*mpitrain.pack"
    ):
        toy.make_job(**{key: iter([BATCH])})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("x = (1,\n", "job.py, line 1: '.' was never closed: x = .1,"),
        ("import mpitrain as mt\njob = mt.Job(epoch=3)\n", "line 2: Job has no field 'epoch'; did you mean 'epochs'"),
        ("import mpitrain as mt\njob = mt.Job(epochs=3)\n", "line 2: Job.* missing 4 required .*'model', 'loss'"),
        ("\nimport numppy\n", "job.py, line 2: No module named 'numppy'; install it beside mpitrain, or correct"),
        ("raise SystemExit('no data today')\n", "job.py exits .'no data today'. before it has defined its `job`"),
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
    with pytest.raises(TypeError, match="not iterable") as caught:
        load_job(str(path))
    told = own_part(caught.value)  # begins with this test: it called load_job itself
    assert "test_user_code.py" in told and "load_job" in told


def test_of_a_traceback_the_users_own_part_is_shown():
    def loss(model, batch):
        return model(batch["x"].view(-1, 7))

    def below_us():
        Checked(loss, "loss")(MODEL, BATCH)

    with ThreadPoolExecutor(1) as pool:  # its frames are the standard library's
        error = pool.submit(Checked(loss, "loss"), MODEL, BATCH).exception()
    told = own_part(error)
    assert told.splitlines()[1].endswith("in loss") and "user_code.py" in "".join(
        traceback.format_exception(error)
    )
    assert "mpitrain/model/gradient/user_code.py" not in told and told.endswith(
        f"{type(error).__name__}: {error}\n"
    )
    assert frames(error) == told.removesuffix(f"{type(error).__name__}: {error}\n")
    with pytest.raises(RuntimeError) as caught:
        below_us()
    assert "in below_us" in own_part(caught.value)  # a script of one's own that calls us: whole


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, x):
        if x.dim() == 3:
            raise OverflowError("three")
        return self.inner(x)


def outer_loss(model, batch):
    return model(batch["x"]).mean()


def test_torchs_frames_between_the_users_line_and_the_error_are_left_out():
    def deep_loss(model, batch):
        return model(batch["x"][None]).mean()

    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(Checked(deep_loss, "loss"), Outer(), BATCH).exception()
    whole, told = "".join(traceback.format_exception(error)), frames(error)
    assert whole.count("/torch/nn/modules/module.py") > 0 and "/torch/" not in told
    assert [line.rpartition(" in ")[2] for line in told.splitlines() if line.startswith("  File")] == [
        "deep_loss", "forward"
    ]  # fmt: skip
    shown = "".join(traceback.format_exception(shortened(error)))
    assert "/torch/nn/modules" not in shown and "gradient/user_code.py" not in shown
    assert shown.endswith("OverflowError: three\n")


def double(batch):
    return {name: one.double() for name, one in batch.items()}


@pytest.mark.parametrize(
    ("model", "batch", "said"),
    [
        (nn.Linear(9, 2), BATCH, r"\(3x5 and 9x2\) \(`return model.*`, .*user_code.py, line \d+\); the mod"),
        (nn.Linear(9, 2), BATCH, r"Linear\(in_features=9.*\), was given float32\[3, 5\]; a batch holds x: float32\["),
        (Outer(), BATCH, r"mean\(\)`.*; `return self.inner\(x\)`.*; layer 'inner.2', Linear\(.*float32\[3, 3\]"),
        (nn.Linear(5, 1), double(BATCH), r"same dtype, but got Double and Float.*holds x: float64\[3, 5\]"),
        (nn.Linear(5, 1), double(BATCH), r"parameters are float32: make x, y float32 where the data are made, or"),
        (nn.Conv1d(3, 2, 1), {"x": torch.zeros(6, 5, 4)}, r"expected input\[6, 5, 4\] to have 3 channels.*Conv1d"),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_go_with_the_model_is_told_in_one_line(model, batch, said):
    with pytest.raises(UsageError, match=said) as caught:
        Checked(outer_loss, "loss")(model, batch)
    assert str(caught.value).startswith("Job: loss: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("returns", [lambda loss: loss, lambda loss: loss.detach(), lambda loss: loss.item()])
def test_a_loss_that_goes_backward_itself_is_told_so(returns):
    def with_backward(model, batch):
        loss = model(batch["x"]).mean()
        loss.backward()
        return returns(loss)

    model, penalized = nn.Linear(5, 1), nn.Linear(5, 1)
    with pytest.raises(
        UsageError, match=r"the loss 'with_backward' \(.*line \d+\) calls .backward\(\), and the job calls"
    ):
        Checked(with_backward, "loss")(model, BATCH)
    assert all(one.grad is None for one in model.parameters())

    def with_penalty(model, batch):  # gradients of its own, which leave none on the parameters
        loss = model(batch["x"]).mean()
        (gradient,) = torch.autograd.grad(loss, model.weight, create_graph=True)
        return loss + gradient.square().sum()

    assert Checked(with_penalty, "loss")(penalized, BATCH).requires_grad


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
