"""Over real ranks: the best model is kept, patience ends a run in order, and such a run can go on."""

import json

import pytest
import torch
from safetensors.torch import load_file

from mpitrain.training.measure import same_model
from tests import toy
from tests.mpi.cases import launch_program
from tests.sampling import ALL_CELLS

ALIKE = ["allreduce()", "sync()", "decentralized()", "pipeline(stages=3)", "tensor(parallel=3)", "sharded()"]
LOCKSTEP = [*ALIKE, "localsgd(period=2)"]
STRATEGIES = [*LOCKSTEP, "async(servers=1)", "decentralized(asynchronous=True, resync=2)"]
if not ALL_CELLS:
    STRATEGIES = ["allreduce()", "localsgd(period=2)", "async(servers=1)"]
TIMED = [text for text in ("allreduce()", "localsgd(period=2)", "sharded()", "sync()") if text in STRATEGIES]
SAMPLES = 52


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    path = tmp_path_factory.mktemp("best")
    launch_program(3, "best_models", str(path), json.dumps(STRATEGIES), cwd=path, timeout_s=500).check()
    return path, json.loads((path / "found.json").read_text())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_model_of_the_first_validation_is_kept_beside_the_last(runs, strategy):
    path, found = runs
    run = found[strategy]["whole"]
    best = run["result"]["best"]
    assert (
        best["value"] == run["validations"][0]["distance"]
        and best["samples"] == run["validations"][0]["samples"]
    )
    files = [path / strategy / "whole" / name for name in ("model-best.safetensors", "model.safetensors")]
    assert load_file(files[0]).keys() == load_file(files[1]).keys() and not same_model(*files)
    losses = [toy_loss(load_file(file)) for file in files]
    assert losses[0] == pytest.approx(-best["value"], rel=1e-5)
    assert losses[1] == pytest.approx(run["result"]["validation_loss"], rel=1e-5)


def toy_loss(tensors):
    module = toy.three_layers()
    module.load_state_dict(tensors)
    reader = toy.MemoryReader(toy.Memory(SAMPLES))
    return toy.square_loss(module, {"x": reader.x, "y": reader.y}).item()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_patience_ends_the_run_with_a_checkpoint_and_status_ok(runs, strategy):
    path, found = runs
    run = found[strategy]["ended"]
    assert run["result"]["ended_early"] and run["result"]["exit_code"] == 0
    assert run["result"]["samples"] < 6 * SAMPLES and len(run["validations"]) >= 3
    if strategy in LOCKSTEP:
        assert len(run["validations"]) == 3 and run["result"]["samples"] <= 3 * SAMPLES + 24
    assert not (path / strategy / "ended" / "REQUEUE").exists()
    still = found[strategy]["still"]["result"]
    assert still["ended_early"]
    if strategy in LOCKSTEP:  # elsewhere what is left is soon done, while the end is still being asked for
        assert still["samples"] < 6 * SAMPLES


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_with_more_patience_it_goes_on_from_there_and_the_best_one_stays(runs, strategy):
    path, found = runs
    on, whole = found[strategy]["on"]["result"], found[strategy]["whole"]["result"]
    assert on["resumed_from"] > 2 * SAMPLES and on["samples"] == whole["samples"] == 6 * SAMPLES
    assert not on["ended_early"]
    assert on["best"]["samples"] == found[strategy]["ended"]["validations"][0]["samples"]
    if strategy in ALIKE:
        assert on["best"] | {"model": ""} == whole["best"] | {"model": ""}
        one, other = (load_file(path / strategy / name / "model.safetensors") for name in ("ended", "whole"))
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("strategy", TIMED)
def test_validations_by_the_clock_are_agreed_on(runs, strategy):
    """Ranks that validate together ask one another about twice a second."""
    _, found = runs
    assert found[strategy]["timed"]["result"]["samples"] == 8 * SAMPLES
    times_s = [row["t"] for row in found[strategy]["timed"]["validations"]]
    assert 1 <= len(times_s) <= (times_s[-1] - times_s[0]) / 0.3 + 2
    assert found[strategy]["later"]["validations"] == [], "only what is measured at the end"
