"""Trained models in fewer bits: bounds of the rounding, files that need nothing of ours, and what is refused."""

import functools
import json
import os
import re
import subprocess
import sys
import types
from functools import partial

import pytest
import torch
from torch import nn

import mpitrain as mt
from mpitrain.cli.main import main
from mpitrain.errors import UsageError
from tests import toy

WAYS = [{"form": "int8", "activations": how} for how in ("full", "dynamic", "calibrated")] + [
    {"form": "fp16"}
]


class Deep(nn.Module):
    """Two linear layers, and one of another kind."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.norm = nn.Linear(5, 64), nn.Linear(64, 64), nn.LayerNorm(64)
        self.last = nn.Linear(64, 1)

    def forward(self, x):
        return self.last(self.norm(torch.relu(self.middle(torch.relu(self.first(x))))))


class Branching(Deep):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


sgd = partial(torch.optim.SGD, lr=0.01)


def trained(path, model=Deep, **changes):
    job = toy.make_job(model=model, loss=loss, validate=toy.Memory(), optimizer=sgd, **changes)
    result = mt.simulate(job, mt.Sync(), workers=2, run_dir=str(path / "run"), quiet=True)
    assert result["status"] == "ok", result["failure"]
    return job


@functools.cache
def has_int8():
    """Whether torchao, which goes with few versions of torch, is here and goes with this one."""
    try:
        import torchao.quantization  # noqa: F401
    except ImportError:
        return False
    return True


needs_int8 = pytest.mark.skipif("not has_int8()", reason="no torchao that goes with this torch")
ELSEWHERE = """
import json, sys
sys.modules["mpitrain"] = None
import torch
files, x = json.loads(sys.argv[1]), torch.load("x")
for file in sorted(files, key=files.get):  # the one that needs nothing but torch first
    if files[file]:
        import torchao.quantization
    else:
        assert "torchao" not in sys.modules
    torch.save(torch.export.load(f"{file}.pt2").module()(x), f"{file}.y")
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The folder of a run and its job; of each way what was measured, and what its file answers elsewhere."""
    path = tmp_path_factory.mktemp("exported")
    job = trained(path)
    done = {
        str(way): mt.export(path / "run", path / f"{at}.pt2", job=job, **way) for at, way in enumerate(WAYS)
    }
    torch.save(toy.Memory().reader(None, 0).batch(0, 3, 7)["x"], path / "x")
    needs_torchao = {str(at): way["form"] == "int8" for at, way in enumerate(WAYS)}
    env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # or torch imports the package by itself
    command = [sys.executable, "-W", "ignore", "-c", ELSEWHERE, json.dumps(needs_torchao)]
    subprocess.run(command, check=True, cwd=path, timeout=300, env=env)
    return path, job, done, {str(way): torch.load(path / f"{at}.y") for at, way in enumerate(WAYS)}


@pytest.mark.parametrize("way", map(str, WAYS))
@needs_int8
def test_the_file_is_a_program_that_needs_nothing_of_ours(exported, way):
    """For batches of any size, in a process that cannot import this package; close to the trained model."""
    path, job, every, answers = exported
    done, found, x = every[way], answers[way], torch.load(path / "x")
    with torch.no_grad():
        expected = mt.load(path / "run", job=job)(x)
    assert found.dtype == torch.float32 and found.shape == (7, 1)
    assert 0 < (found - expected).abs().max() < 0.05 * expected.abs().max()
    before, after = (one["validation_loss"] for one in done.metrics)
    assert before != after and after == pytest.approx(before, rel=0.05)
    assert min(done.batch_s) > 0 and done.file_bytes[1] == done.path.stat().st_size


@pytest.mark.parametrize("way", WAYS[:3], ids=str)
@needs_int8
def test_quantised_layers_take_a_byte_a_number_and_the_others_are_named(tmp_path, way):
    job = trained(tmp_path)
    done = mt.export(tmp_path / "run", tmp_path / "model.pt2", job=job, **way)
    assert done.layers == ("first", "middle", "last")
    assert done.left == {"norm": "torchao quantises nn.Linear, this is LayerNorm"}
    numbers, rows = 5 * 64 + 64 * 64 + 64, 64 + 64 + 1
    assert done.layer_bytes[0] == 4 * (numbers + rows)
    # scale, zero point (of 8 bytes by torchao 0.17) and bias of a row
    assert done.layer_bytes[1] <= numbers + (4 + 8 + 4) * rows + 3 * 8
    assert done.layer_bytes[1] < 0.4 * done.layer_bytes[0]


@pytest.mark.parametrize("how", ["full", "dynamic", "calibrated"])
@needs_int8
def test_a_layer_may_take_in_sequences(tmp_path, how):
    layers = (nn.Linear(5, 24), nn.Unflatten(1, (4, 6)), nn.Linear(6, 4), nn.Flatten(), nn.Linear(16, 1))
    job = trained(tmp_path, lambda: nn.Sequential(*layers))
    done = mt.export(tmp_path / "run", tmp_path / "model.pt2", job=job, activations=how)
    before, after = (one["validation_loss"] for one in done.metrics)
    assert done.layers == ("0", "2", "4") and after == pytest.approx(before, rel=0.05)


def one_layer():
    return nn.Linear(5, 3)


@needs_int8
def test_a_weight_is_off_by_half_a_step_of_its_row_at_most(tmp_path):
    job = trained(tmp_path, one_layer)
    done = mt.export(tmp_path / "run", tmp_path / "model.pt2", job=job)
    program, layer = torch.export.load(str(done.path)).module(), mt.load(tmp_path / "run", job=job)
    with torch.no_grad():
        off = (program(torch.eye(5)) - layer(torch.eye(5))).abs()  # one weight a number
        step = layer.weight.abs().amax(1) / 127
    assert (off <= step / 2 * (1 + 1e-4) + 1e-6).all() and (off > 0).any()


def test_half_precision_computes_in_16_bits(tmp_path):
    job = trained(tmp_path, one_layer)
    done = mt.export(tmp_path / "run", tmp_path / "model.pt2", job=job, form="fp16")
    layer, x = mt.load(tmp_path / "run", job=job), torch.randn(4, 5)
    with torch.no_grad():
        expected = layer.half()(x.half()).float()
    assert torch.equal(torch.export.load(str(done.path)).module()(x), expected)
    assert done.layer_bytes[1] * 2 == done.layer_bytes[0] and not done.left


REFUSED = [
    ({"form": "int4"}, "did you mean 'int8'"),
    ({"activations": "dynamical"}, "did you mean 'dynamic'"),
    ({"form": "fp16", "activations": "dynamic"}, "these are of int8"),
    ({"which": "best"}, "has kept no best model"),
]


@pytest.mark.parametrize(("way", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_asked_for(tmp_path, way, said):
    job = trained(tmp_path)
    with pytest.raises(UsageError, match=said):
        mt.export(tmp_path / "run", tmp_path / "model.pt2", job=job, **way)
    assert not (tmp_path / "model.pt2").exists()


@needs_int8
def test_a_forward_pass_that_is_no_program_leaves_no_file(tmp_path):
    job = trained(tmp_path, Branching)
    with pytest.raises(
        UsageError, match="cannot write this model's forward pass as a program: .*data-dependent"
    ):
        mt.export(tmp_path / "run", tmp_path / "model.pt2", job=job)
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


class Served(Deep):
    def __init__(self):
        super().__init__()
        self.table = mt.ServedEmbedding(17, 5)

    def forward(self, x):
        return super().forward(self.table((x[:, 0].abs() * 4).long() % 17))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: nn.Conv1d(1, 1, 1), "this model has none: Conv1d; use --fp16"),
        (Served, "the rows of table are in tables-0"),
    ],
)
@needs_int8
def test_a_model_that_cannot_be_quantised(tmp_path, model, said):
    job = toy.make_job(
        model=model, loss=by_column if model is not Served else loss, validate=toy.Memory(), optimizer=sgd
    )
    mt.simulate(job, mt.Sync(), workers=2, run_dir=str(tmp_path / "run"), quiet=True)
    with pytest.raises(UsageError, match=said):
        mt.export(tmp_path / "run", tmp_path / "model.pt2", job=job)


def by_column(model, batch):
    return (model(batch["x"].unsqueeze(1)).mean(2) - batch["y"]).square().mean()


def test_without_torchao_the_way_out_is_said(tmp_path, monkeypatch):
    job = trained(tmp_path)
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(UsageError, match=r"pip install mpitrain\[int8\]"):
        mt.export(tmp_path / "run", tmp_path / "model.pt2", job=job)
    assert mt.export(tmp_path / "run", tmp_path / "model.pt2", job=job, form="fp16").layers


def test_a_torchao_that_does_not_go_with_this_torch_is_not_called_absent(tmp_path, monkeypatch):
    job = trained(tmp_path)
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "torchao" or None)
    for version, way_out in (
        ("2.9.1", "pip install torchao==0.17"),
        ("2.99.0+cpu", "install another torchao"),
    ):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(
            UsageError, match=rf"does not go with torch {re.escape(version)}.*{way_out}.*--fp16"
        ):
            mt.export(tmp_path / "run", tmp_path / "model.pt2", job=job)


@needs_int8
def test_the_command_writes_once_and_prints_what_it_has_measured(tmp_path, capsys):
    (tmp_path / "deep.py").write_text(
        "from tests import toy\nfrom torch import nn\n"
        "def model():\n    return nn.Sequential(nn.Linear(5, 9), nn.LayerNorm(9), nn.Linear(9, 1))\n"
        "job = toy.make_job(model=model, loss=toy.square_loss, validate=toy.Memory())\n"
    )
    run, out, job = (str(tmp_path / name) for name in ("run", "model.pt2", "deep.py"))
    assert main(["simulate", job, "--strategy", "sync()", "--run-dir", run, "--quiet"]) == 0
    capsys.readouterr()
    assert main(["export", run, "--job", job, "--int8", "--activations", "dynamic", "-o", out]) == 0, (
        capsys.readouterr().err
    )
    said = capsys.readouterr().out
    assert all(len(line) <= 80 for line in said.splitlines()[:5])
    assert "2 layers" in said and "validation_loss" in said and f"written to {out}" in said
    assert "as it was: layer 1: torchao quantises nn.Linear, this is LayerNorm" in said
    assert main(["export", run, "--job", job, "--fp16", "-o", out]) == 2
    assert "model.pt2 exists; give another name, or --overwrite to replace it" in capsys.readouterr().err
    assert main(["export", run, "--job", job, "--fp16", "-o", out, "--overwrite"]) == 0
    assert "as it was" not in capsys.readouterr().out
