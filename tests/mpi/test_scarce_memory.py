"""A model whose parameters, gradients and optimizer state take three times what a rank may use trains where it is
split, and goes on from its checkpoint, under the same limit; and it begins with the bits of the whole model."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import scarce
from tests.mpi.cases import launch_program
from tests.sampling import asked_for

SPLIT = {
    "sharded": "sharded()", "tensor": "tensor(parallel=8)", "pipeline": "pipeline(stages=8,microbatches=8)",
}  # fmt: skip
WAYS = ("sharded", "replicas", "tensor", "pipeline")


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    path, names = tmp_path_factory.mktemp("scarce"), asked_for(request, "name")
    ways = [way for name, way in SPLIT.items() if name in names]
    launch_program(8, "scarce_memory", str(path), *ways, timeout_s=300).check()
    return path


@pytest.mark.extended
@pytest.mark.parametrize("name", SPLIT)
def test_it_trains_within_a_third(trained, name):
    result = json.loads((trained / name / "result.json").read_text())
    assert (result["status"], result["steps"], result["resumed_from"]) == ("ok", 2, scarce.BATCH)
    for rank in range(8):
        for before, limit in json.loads((trained / f"sizes-{rank}.json").read_text())[name]:
            assert limit - before == scarce.NEEDED_BYTES // 3


@pytest.mark.extended
def test_all_ways_train_to_the_same_model(trained):
    first, *others = (load_file(trained / name / "model.safetensors") for name in SPLIT)
    for other in others:
        assert other.keys() == first.keys()
        for name, tensor in first.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-4)


def test_the_whole_model_does_not_fit(tmp_path):
    told = launch_program(2, "scarce_memory", str(tmp_path), "allreduce()")
    assert told.code != 0 and "can't allocate memory" in str(told)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    path = tmp_path_factory.mktemp("built")
    torch.manual_seed(7)
    save_file({name: torch.rand(one.shape) for name, one in whole().items()}, path / "start.safetensors")
    told = launch_program(4, "built_by_layers", str(path), timeout_s=300).check()
    return path, str(told)


def whole(model=scarce.several):
    torch.manual_seed(scarce.job.seed)
    state = model().state_dict()
    return {
        name: tensor for name, tensor in state.items() if "running" not in name and "num_batches" not in name
    }


@pytest.mark.parametrize("file", ["model.safetensors", "model-ema.safetensors"])
@pytest.mark.parametrize("way", WAYS)
def test_it_begins_with_the_bits_of_the_whole_model(built, way, file):
    found = load_file(built[0] / way / file)
    assert all(torch.equal(found[name], tensor) for name, tensor in whole().items())


@pytest.mark.parametrize("way", WAYS)
def test_it_begins_with_the_weights_of_a_file(built, way):
    found = load_file(built[0] / f"{way}-init" / "model.safetensors")
    weights = load_file(built[0] / "start.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_what_cannot_be_built_by_layers_is_whole_and_the_log_says_why(built):
    found = load_file(built[0] / "whole" / "model.safetensors")
    assert all(torch.equal(found[name], one) for name, one in whole(scarce.reading_weights).items())
    lines = (built[0] / "whole" / "metrics.jsonl").read_text().splitlines()
    (because,) = (
        json.loads(line)["because"] for line in lines if "every rank builds the whole model" in line
    )
    assert "gradient function" in because
    assert "builds" not in (built[0] / "sharded" / "metrics.jsonl").read_text()
