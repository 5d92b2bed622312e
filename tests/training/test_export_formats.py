"""TorchScript and ONNX files: what a process without this package reads of them, and what cannot be held."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import mpitrain as mt
from mpitrain.cli.main import main
from mpitrain.errors import UsageError
from mpitrain.training.trained.export_formats import ONNX_PACKAGES
from tests import toy

needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ONNX_PACKAGES), reason="needs mpitrain[onnx]"
)
FORMS = ["torchscript", pytest.param("onnx", marks=needs_onnx)]
READERS = {
    "torchscript": "found = torch.jit.load({path!r})(x)",
    "onnx": """
import onnxruntime
session = onnxruntime.InferenceSession({path!r}, providers=["CPUExecutionProvider"])
found = torch.from_numpy(session.run(None, {{session.get_inputs()[0].name: x.numpy()}})[0])
""",
}


class Branching(nn.Module):
    """Which way it goes depends on the data."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x):
        if bool(x.sum() > 0):
            return self.layer(x)
        return -self.layer(x)


class Tangled(Branching):
    """As before, and in Python that TorchScript does not compile."""

    def forward(self, *arguments, **named):
        return super().forward(*arguments, **named)


class Twofold(Branching):
    """It does something else where it is traced, as libraries do now and then."""

    def forward(self, x):
        return self.layer(x) * (2.0 if torch.jit.is_tracing() else 1.0)


class Drawing(Branching):
    """Its answers are draws, so no two of them are equal."""

    def forward(self, x):
        return self.layer(x) + torch.rand_like(x[:, :1])


class Spectral(Branching):
    """By an operator that ONNX has not."""

    def forward(self, x):
        hidden = self.layer(x)
        return hidden + torch.linalg.eigvalsh(hidden.detach().T @ hidden.detach())


def run_of(path, model=toy.normed):
    job = toy.make_job(model=model, validate=toy.Memory(29))
    result = mt.simulate(job, mt.Sync(), workers=2, run_dir=str(path / "run"), quiet=True)
    assert result["status"] == "ok", result["failure"]
    return job


@pytest.mark.parametrize("form", FORMS)
def test_a_fresh_process_without_this_package_reads_the_file(tmp_path, form):
    job = run_of(tmp_path)
    done = mt.export(tmp_path / "run", tmp_path / "model.out", job=job, form=form)
    x = toy.MemoryReader(toy.Memory()).x[:7]
    torch.save(x, tmp_path / "x")
    code = f"""
import sys
sys.modules["mpitrain"] = None
import torch
x = torch.load({str(tmp_path / "x")!r})
{READERS[form].format(path=str(done.path))}
torch.save(found, {str(tmp_path / "y")!r})
"""
    env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # or torch imports the package by itself
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=300, env=env)
    with torch.no_grad():
        expected = mt.load(tmp_path / "run", job=job)(x)
    assert torch.allclose(torch.load(tmp_path / "y"), expected, atol=1e-6)
    before, after = done.metrics
    assert before == pytest.approx(after, abs=1e-6) and "validation_loss" in after
    assert not done.layers and not done.left
    assert done.file_bytes == tuple(
        path.stat().st_size for path in (tmp_path / "run" / "model.safetensors", tmp_path / "model.out")
    )


def test_a_branch_by_the_data_is_compiled_and_goes_both_ways(tmp_path):
    job = run_of(tmp_path, Branching)
    done = mt.export(tmp_path / "run", tmp_path / "model.pt", job=job, form="torchscript")
    found, model = torch.jit.load(str(done.path)), mt.load(tmp_path / "run", job=job)
    for x in (torch.ones(2, 5), -torch.ones(2, 5)):
        assert torch.equal(found(x), model(x))


def test_a_model_that_draws_is_written_though_its_answers_differ(tmp_path):
    job = run_of(tmp_path, Drawing)
    done = mt.export(tmp_path / "run", tmp_path / "model.pt", job=job, form="torchscript")
    found, model, x = torch.jit.load(str(done.path)), mt.load(tmp_path / "run", job=job), torch.ones(4, 5)
    assert ((found(x) - model.layer(x)).detach() > 0).all() and not torch.equal(found(x), found(x))


REFUSED = {
    "by the data": (
        "torchscript",
        Tangled,
        "its trace depends on the data .* and its source cannot be compiled",
    ),
    "is no other": ("torchscript", Twofold, "for a batch of 6 its answer is off by"),
    "by the data, too": ("onnx", Branching, "forward pass as a program: .*data-dependent"),
    "has no operator": (
        "onnx",
        Spectral,
        "ONNX cannot hold this model: No ONNX function found for .*_linalg_eigh",
    ),
}


@pytest.mark.parametrize(
    ("form", "model", "said"),
    [pytest.param(*case, marks=needs_onnx if case[0] == "onnx" else ()) for case in REFUSED.values()],
    ids=REFUSED,
)
def test_what_a_format_cannot_hold_is_refused_with_the_reason(tmp_path, form, model, said):
    job = run_of(tmp_path, model)
    with pytest.raises(UsageError, match=said):
        mt.export(tmp_path / "run", tmp_path / "model.out", job=job, form=form)
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("name", ONNX_PACKAGES)
def test_without_its_packages_the_way_out_is_said(tmp_path, monkeypatch, name):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda one, *more: None if one == name else found(one, *more) or object()
    )
    with pytest.raises(UsageError, match=rf"onnx needs .*{name}.*pip install mpitrain\[onnx\]"):
        mt.export(tmp_path / "run", tmp_path / "model.onnx", form="onnx")


def test_one_format_a_call(capsys):
    for words in (["--onnx", "--int8"], ["--torchscript", "--fp16"], []):
        with pytest.raises(SystemExit) as left:
            main(["export", "run", *words, "-o", "out"])
        assert left.value.code == 2
    assert "--torchscript" in capsys.readouterr().err


@needs_onnx
def test_an_ensemble_is_exported_like_a_run(tmp_path):
    for seed in (1, 2):
        job = toy.make_job(model=lambda: toy.wide(4), validate=toy.Memory(29), seed=seed)
        mt.simulate(job, mt.Sync(), workers=2, run_dir=str(tmp_path / str(seed)), quiet=True)
    mt.ensemble([tmp_path / "1", tmp_path / "2"], tmp_path / "both", job=job)
    expected, x = mt.load(tmp_path / "both", job=job), toy.MemoryReader(toy.Memory()).x
    assert expected.how == "outputs"
    for form in ("torchscript", "onnx", "fp16"):
        done = mt.export(tmp_path / "both", tmp_path / form, job=job, form=form)
        assert done.metrics[0] == pytest.approx(done.metrics[1], rel=1e-2)
    with torch.no_grad():
        assert torch.allclose(torch.jit.load(str(tmp_path / "torchscript"))(x), expected(x), atol=1e-6)
