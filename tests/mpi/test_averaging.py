"""Periodic averaging over real ranks (`programs/averaging_cases.py`)."""

import json

import pytest

from mpitrain import simulate
from mpitrain.training.measure import same_model
from tests import toy
from tests.mpi.cases import assert_passed, case_names, launch
from tests.mpi.simulated import RUNS


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("averaging")


@pytest.fixture(scope="module")
def ranks(out):
    return launch(4, "averaging_cases", env={"AVERAGING_OUT": str(out)})


@pytest.mark.parametrize("case", case_names("averaging_cases"))
def test_case(ranks, case):
    assert_passed(ranks, case)


@pytest.mark.parametrize("name", RUNS)
def test_a_simulation_makes_the_same_bits(ranks, out, tmp_path, name):
    strategy, changes = RUNS[name]
    virtual = simulate(toy.make_job(**changes), strategy, workers=4, run_dir=str(tmp_path), quiet=True)
    real = json.loads((out / f"simulated-{name}" / "result.json").read_text())
    assert same_model(out / f"simulated-{name}" / "model.safetensors", tmp_path / "model.safetensors")
    for key in ("steps", "samples", "accepted", "averagings", "averaging_bytes"):
        assert virtual[key] == real[key], key
    drifts = [[one["drift"] for one in result["ranks"]] for result in (real, virtual)]
    assert drifts[0] == pytest.approx(drifts[1]) and virtual["averagings"] > 0
