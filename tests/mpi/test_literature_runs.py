"""The jobs of the literature by ranks: what several train, what is left of it as a file, and that they come to their
targets."""

import dataclasses
import json
import sys

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.cli.main import main
from tests.mpi import literature
from tests.mpi.cases import launch_program
from tests.ranks import ROOT, run_plain

RANKS = 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("literature")
    launch_program(RANKS, "literature_runs", str(folder), cwd=folder, timeout_s=300).check()
    return folder


@pytest.mark.parametrize("name", literature.NAMES)
def test_ranks_train_what_virtual_ranks_do(trained, tmp_path, name):
    job, options = literature.job_of(name), literature.options(tmp_path, name, "allreduce")
    mt.simulate(job, mt.AllReduce(), workers=RANKS, **options)
    real, virtual = (
        load_file(f"{folder}/{name}-allreduce/model.safetensors") for folder in (trained, tmp_path)
    )
    assert real.keys() == virtual.keys()
    for key, tensor in real.items():
        torch.testing.assert_close(tensor, virtual[key], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", literature.NAMES)
def test_a_server_trains_on_the_batches_of_all_its_workers_to_the_bit(trained, tmp_path, name):
    result = json.loads((trained / f"{name}-async" / "result.json").read_text())
    workers = RANKS - 1
    assert result["status"] == "ok" and result["accepted"] == workers * literature.STEPS
    assert result["samples"] == workers * literature.STEPS * literature.BATCH
    found = mt.simulate(
        literature.job_of(name),
        replay=str(trained / f"{name}-async"),
        run_dir=str(tmp_path / "replayed"),
        quiet=True,
    )
    assert found["replay_identical"]


@pytest.mark.parametrize("name", literature.NAMES)
def test_a_dry_run_says_what_a_push_weighs(name, capsys):
    job = str(ROOT / "jobs" / f"{name}.py")
    asked = ["--dry-run", "--synthetic", "--ranks", "4", "--strategy", "async(servers=1)"]
    assert main(["train", job, *asked]) == 0
    num_bytes = 4 * sum(one.numel() for one in literature.job_of(name).model().parameters())
    assert f"each worker sends {num_bytes / 1024:.1f} KiB" in capsys.readouterr().out


def test_the_trained_cnn_predicts_and_goes_into_eight_bits(trained, tmp_path):
    run_dir, x = trained / "cnn-allreduce", torch.randn(9, 3, 32, 32)
    np.savez(tmp_path / "images.npz", x=x.numpy(), y=np.zeros(9, np.int64))
    mt.pack(str(tmp_path / "images.npz"), tmp_path / "images", validate=0.0)
    job = literature.job_of("cnn")
    few = mt.Synthetic(32, x=((3, 32, 32), "float32"), y=((), "int64", 10))
    job = dataclasses.replace(job, validate=few)
    mt.predict(run_dir, str(tmp_path / "images" / "train-*.h5"), tmp_path / "out.h5", job=job)
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["prediction"].shape == (9, 10)
    mt.export(run_dir, tmp_path / "cnn.pt2", job=job)
    import torchao.quantization  # noqa: F401 - the file needs its tensors

    less = torch.export.load(tmp_path / "cnn.pt2").module()
    torch.testing.assert_close(less(x), mt.load(run_dir, job=job)(x), rtol=0.1, atol=0.02)


@pytest.mark.extended
@pytest.mark.parametrize("name", ["digits", "ranking", *literature.NAMES])
def test_it_reaches_its_target_with_allreduce_and_with_a_server(tmp_path, name):
    """On two workers: more of them take larger steps, fewer in the job's epochs."""
    command = [sys.executable, str(ROOT / "benchmarks" / "literature.py"), "--jobs", name, "--workers", "2"]
    out = run_plain(command, cwd=tmp_path, timeout_s=560)  # exits with 3 where one missed it
    assert out.count("1 of 1") == 2
