"""`init` in virtual time and by part, and what `mt.load` refuses."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import mpitrain as mt
from mpitrain.cli.main import main
from mpitrain.errors import UsageError
from mpitrain.training.job_file import load_job
from mpitrain.training.resuming.fingerprint import file_digest
from mpitrain.training.resuming.initial_weights import WeightsFile, compare_weights, load_weights, start_from
from mpitrain.values import parse
from tests import toy
from tests.mpi.start_files import JOB, write_start


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    write_start(tmp_path)
    return tmp_path


def simulate(folder, name="run", **options):
    options = {"strategy": "async()", "lr": 0.0} | options
    given = {"run_dir": str(folder / name), "quiet": True, "workers": 3} | options
    strategy = parse(given.pop("strategy"), "strategy")
    return mt.simulate(load_job(str(folder / "job.py")), strategy, **given)


@pytest.mark.parametrize("strategy", ["async()", "sync(servers=2)", "localsgd(period=2)", "decentralized()"])
def test_a_simulation_starts_from_the_file(folder, strategy):
    simulate(folder, strategy=strategy, init=folder / "start.safetensors")
    start, trained = (load_file(folder / name) for name in ("start.safetensors", "run/model.safetensors"))
    assert all(torch.equal(start[name], trained[name]) for name in start | trained)
    (row,) = [row for row in rows(folder / "run") if row["event"] == "initial weights"]
    assert row["loaded"] == "7 of 7 tensors"


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_by_part_what_fits_is_loaded_and_the_rest_reported(folder):
    simulate(folder, init=str(folder / "other.safetensors"), init_partial=True)
    start, trained = (load_file(folder / name) for name in ("start.safetensors", "run/model.safetensors"))
    assert {name for name in start if torch.equal(start[name], trained[name])} == start.keys() - {
        "3.bias", "5.weight",
    }  # fmt: skip
    (row,) = [row for row in rows(folder / "run") if row["event"] == "initial weights"]
    assert row["loaded"] == "5 of 7 tensors"
    assert row["not_in_file"] == ["3.bias"] and row["not_in_model"] == ["head"]
    assert row["other_shapes"] == ["5.weight (2, 6), in the model (1, 6)"]


def test_what_cannot_be_read_or_fits_nowhere_is_refused(folder):
    (folder / "text").write_text("no tensors")
    torch.save({"elsewhere": torch.ones(1)}, folder / "best.pt")
    torch.save({"elsewhere": torch.ones(1)}, folder / "old.pt", _use_new_zipfile_serialization=False)
    save_file({"elsewhere": torch.ones(1)}, folder / "elsewhere.safetensors")
    for name, said in [
        ("other.safetensors", "does not fit the model: not in the file: 3.bias; not in the model: head"),
        ("none.safetensors", "there is no such file"), ("text", "cannot be read as safetensors"),
        ("best.pt", "best.pt is a file of torch.save, a pickle; write its weights anew with safetensors"),
        ("old.pt", "old.pt is a file of torch.save"),
        (".", "is a directory"), ("elsewhere.safetensors", "not in the model: elsewhere"),
    ]:  # fmt: skip
        with pytest.raises(UsageError, match=said.replace(".", r"\.")):
            simulate(folder, init=str(folder / name))
    with pytest.raises(UsageError, match="none of its tensors fits"):
        simulate(folder, init=str(folder / "elsewhere.safetensors"), init_partial=True)
    with pytest.raises(UsageError, match="give init, too"):
        simulate(folder, init_partial=True)
    with pytest.raises(UsageError, match="path of a safetensors file"):
        toy.make_job(init=3)


def test_the_job_names_them_too_and_the_command_line_comes_first(folder):
    job = toy.make_job(model=lambda: nn.Linear(5, 1), init=folder / "start.safetensors", init_partial=True)
    with pytest.raises(UsageError, match="none of its tensors fits"):
        start_from(job, nn.Linear(5, 1))
    given = [str(folder / "job.py"), "--strategy", "async()", "--init", str(folder / "start.safetensors")]
    common = ["--quiet", "--run-dir", str(folder / "run"), "--workers", "2", "--lr", "0"]
    assert main(["simulate", *given, *common]) == 0
    dry = ["train", str(folder / "job.py"), "--dry-run", "--init", str(folder / "other.safetensors")]
    assert main(dry) == 2 and main([*dry, "--init-partial"]) == 0


def test_of_tied_weights_one_name_is_enough(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight

    tied = Tied()
    save_file({"embed.weight": torch.full((4, 3), 0.5)}, tmp_path / "weights")
    weights = WeightsFile(tmp_path / "weights", "init")
    assert not compare_weights(tied, weights)
    load_weights(tied, weights)
    assert tied.head.weight.unique().tolist() == [0.5]


@pytest.fixture
def run(folder):
    """A finished run, as `mpitrain train job.py` leaves it."""
    simulate(folder)
    file = folder / "job.py"
    record = {"job_file": str(file), "job_sha256": file_digest(file)}
    (folder / "run" / "run.json").write_text(json.dumps(record))
    return folder / "run"


def test_a_run_is_loaded_without_mpi_and_without_moving_random_numbers(run):
    code = f"""
import sys, torch
torch.manual_seed(1)
import mpitrain as mt
module = mt.load({str(run)!r})
assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(1)))
assert not torch.distributed.is_initialized() and "mpi4py.MPI" not in sys.modules
print(type(module).__name__, module.training)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.split() == ["Sequential", "False"], done.stderr


def test_what_a_run_has_returned_says_where_it_is(tmp_path):
    job = toy.make_job(predict=lambda model, batch: model(batch["x"]))
    result = mt.train(job, mt.AllReduce(), threads=1, run_dir=str(tmp_path / "run"), quiet=True)
    loaded, named = mt.load(result, job), mt.load(tmp_path / "run", job)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in named.state_dict().items())
    assert mt.predict(result, toy.Memory(), tmp_path / "out.h5", job=job).num_samples == 48


def test_a_module_that_the_job_holds_stays_as_it_is(run):
    module = load_job(str(run.parent / "job.py")).model()
    before = module[0].weight.clone()
    loaded = mt.load(run, job=toy.make_job(model=module))
    assert torch.equal(module[0].weight, before) and loaded is not module


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (shutil.rmtree, "holds no run"),
        (lambda run: (run / "result.json").unlink(), "not finished.*--resume auto"),
        (lambda run: (run / "result.json").write_text('{"exit_code": 75}'), "not finished"),
        (
            lambda run: (run / "result.json").write_text('{"exit_code": 1, "failure": "the loss is nan"}'),
            "has failed: the loss is nan",
        ),
        (lambda run: (run / "model.safetensors").unlink(), "model.*there is no such file"),
        (lambda run: (run / "run.json").write_text('{"job_file": null}'), "no variable of a script.*job="),
        (lambda run: (run / "run.json").unlink(), "no variable of a script.*job="),
        (lambda run: (run.parent / "job.py").unlink(), "is gone; pass the job"),
        (lambda run: (run.parent / "job.py").open("a").write("# changed\n"), "has changed since.*job="),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_says_what_to_do(run, harm, said):
    harm(run)
    with pytest.raises(UsageError, match=f"(?s){said}"):
        mt.load(run)


def test_weights_of_another_model_are_refused_and_a_changed_file_is_taken_where_it_is_named(run):
    with pytest.raises(UsageError, match=r"do not fit the model.*pass the job"):
        mt.load(run, job=toy.make_job())
    with (run.parent / "job.py").open("a") as file:
        file.write("# changed\n")
    assert isinstance(mt.load(run, job=run.parent / "job.py"), nn.Sequential)
