"""Embeddings with sparse gradients over real ranks (`programs/sparse_cases.py`), and the same in virtual time."""

import json

import pytest

import mpitrain as mt
from mpitrain.training.measure import same_model
from tests import sparse_jobs
from tests.mpi.cases import assert_passed, case_names, launch
from tests.sampling import asked_for, sampled


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("sparse")


KINDS = ["-".join(kind) for kind in sparse_jobs.KINDS]
# every two of layer, words and optimizer; a table on servers has others (`test_tables.py`)
SAMPLE = ("embedding-many-sgd", "embedding-few-adagrad", "bag-many-adagrad", "bag-few-sgd")


@pytest.fixture(scope="module")
def ranks(out, request):
    kinds = sorted(asked_for(request, "kind") - {None}) or SAMPLE
    return launch(4, "sparse_cases", env={"SPARSE_OUT": str(out), "SPARSE_KINDS": " ".join(kinds)})


@pytest.mark.parametrize("case", case_names("sparse_cases"))
def test_case(ranks, case):
    assert_passed(ranks, case)


@pytest.mark.parametrize("kind", sampled(KINDS, SAMPLE))
def test_a_simulation_makes_the_same_bits(ranks, out, tmp_path, kind):
    assert_passed(ranks, "case_the_bits_are_those_of_dense_gradients")
    layer, words, optimizer = kind.split("-")
    job = sparse_jobs.make_job(layer=layer, words=words, optimizer=optimizer)
    virtual = mt.simulate(job, mt.AllReduce(), workers=4, run_dir=str(tmp_path), quiet=True)
    real = json.loads((out / kind / "result.json").read_text())
    assert virtual["steps"] == real["steps"]
    assert same_model(out / kind / "model.safetensors", tmp_path / "model.safetensors")
