"""Embeddings with sparse gradients over real ranks (`programs/sparse_cases.py`), and the same in virtual time."""

import json

import pytest

import mpitrain as mt
from mpitrain.training.measure import same_model
from tests import sparse_jobs
from tests.mpi.cases import assert_passed, case_names, launch


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("sparse")


@pytest.fixture(scope="module")
def ranks(out):
    return launch(4, "sparse_cases", env={"SPARSE_OUT": str(out)})


@pytest.mark.parametrize("case", case_names("sparse_cases"))
def test_case(ranks, case):
    assert_passed(ranks, case)


@pytest.mark.parametrize(("layer", "words", "optimizer"), sparse_jobs.KINDS)
def test_a_simulation_makes_the_same_bits(ranks, out, tmp_path, layer, words, optimizer):
    job = sparse_jobs.make_job(layer=layer, words=words, optimizer=optimizer)
    virtual = mt.simulate(job, mt.AllReduce(), workers=4, run_dir=str(tmp_path), quiet=True)
    real = json.loads((out / f"{layer}-{words}-{optimizer}" / "result.json").read_text())
    assert virtual["steps"] == real["steps"]
    assert same_model(
        out / f"{layer}-{words}-{optimizer}" / "model.safetensors", tmp_path / "model.safetensors"
    )
