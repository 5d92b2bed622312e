"""Periodic averaging over real ranks (`programs/averaging_cases.py`)."""

import json

import pytest
import torch
from safetensors.torch import load_file

from mpitrain import simulate
from mpitrain.training.local_sgd.averager import Averager
from mpitrain.training.measure import same_model
from tests import toy
from tests.mpi.cases import assert_passed, case_names, launch
from tests.mpi.simulated import NEARLY, PIECE_BYTES, RUNS, TOGETHER
from tests.sampling import asked_for, sampled


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("averaging")


# but those whose like is there: of "average" slowmo, of "quadratic" rest, of "powersgd" threshold, of copies one
SAMPLE = {*RUNS, *TOGETHER} - {"average", "quadratic", "powersgd", "two copies"}


@pytest.fixture(scope="module")
def ranks(out, request):
    names = json.dumps(sorted(asked_for(request, "name") - {None}))
    return launch(4, "averaging_cases", env={"AVERAGING_OUT": str(out), "SIMULATED": names})


@pytest.mark.parametrize("case", case_names("averaging_cases"))
def test_case(ranks, case):
    assert_passed(ranks, case)


@pytest.mark.parametrize("name", sampled(RUNS, SAMPLE))
def test_a_simulation_makes_the_same_bits(ranks, out, tmp_path, name, monkeypatch):
    """Both average in pieces of a few numbers each."""
    monkeypatch.setattr(Averager, "piece_bytes", PIECE_BYTES)
    strategy, changes = RUNS[name]
    virtual = simulate(toy.make_job(**changes), strategy, workers=4, run_dir=str(tmp_path), quiet=True)
    real = json.loads((out / f"simulated-{name}" / "result.json").read_text())
    assert same_model(out / f"simulated-{name}" / "model.safetensors", tmp_path / "model.safetensors")
    for key in ("steps", "samples", "accepted", "averagings", "averaging_bytes"):
        assert virtual[key] == real[key], key
    drifts = [[one["drift"] for one in result["ranks"]] for result in (real, virtual)]
    assert drifts[0] == pytest.approx(drifts[1]) and virtual["averagings"] > 0


@pytest.mark.parametrize("name", sampled(TOGETHER, SAMPLE))
def test_a_simulation_of_ranks_that_step_together_makes_the_same_parameters(ranks, out, tmp_path, name):
    strategy, changes = TOGETHER[name]
    virtual = simulate(toy.make_job(**changes), strategy, workers=4, run_dir=str(tmp_path), quiet=True)
    real_dir = out / f"simulated-{name}"
    real = json.loads((real_dir / "result.json").read_text())
    for key in ("steps", "samples", "accepted", "nonfinite", "samples_left_out"):
        assert virtual[key] == real[key], key
    for key, value in real["metrics"].items():
        assert virtual["metrics"][key] == pytest.approx(value, rel=1e-5)
    if name not in NEARLY:
        assert same_model(real_dir / "model.safetensors", tmp_path / "model.safetensors")
        return
    files = ("model.safetensors", "model-ema.safetensors") if "ema" in changes else ("model.safetensors",)
    for file in files:
        expected, got = load_file(real_dir / file), load_file(tmp_path / file)
        assert expected.keys() == got.keys()
        for key in expected:
            torch.testing.assert_close(got[key], expected[key], rtol=1e-6, atol=1e-6)
