"""Over real ranks: all workers measure a validation set together, and one that dies in it costs no figure."""

import json

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from tests import toy
from tests.mpi.cases import launch_program
from tests.mpi.test_recovery import ULFM
from tests.sampling import ALL_CELLS

STRATEGIES = [
    "allreduce()", "sync(servers=2)", "async()", "localsgd(period=2)", "decentralized()", "sharded()",
    "pipeline(stages=2, microbatches=2)",
]  # fmt: skip
if ALL_CELLS:
    STRATEGIES += [
        "backup()", "async(servers=2, inflight=2)", "softsync(updates=2)", "ssp(bound=2)", "bounded(staleness=2)",
        "elastic(push_every=2)", "decentralized(topology='ring')", "decentralized(asynchronous=True, resync=2)",
        "tensor(parallel=2)",
    ]  # fmt: skip
ALONE = ["decentralized(asynchronous=True, resync=2)"]
RANKS = 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("divided")
    launch_program(
        RANKS, "divided_validation", str(path), "whole", json.dumps(STRATEGIES), cwd=path, timeout_s=500
    ).check()
    return path


def loss_of(path, strategy, name):
    module = toy.three_layers() if strategy.startswith("tensor") else toy.normed()
    module.load_state_dict(load_file(path / name))
    reader = toy.MemoryReader(toy.Memory(2100))
    total = 0.0
    with torch.no_grad():
        for x, y in zip(reader.x.split(256), reader.y.split(256)):
            total += toy.square_loss(module.eval(), {"x": x, "y": y}).item() * len(x)
    return total / 2100


def check(path, strategy):
    result = json.loads((path / "result.json").read_text())
    exact = not strategy.startswith(("tensor", "sharded", "pipeline"))
    for name, metric in (("model", "validation_loss"), ("model-ema", "ema_validation_loss")):
        expected = loss_of(path, strategy, f"{name}.safetensors")
        assert result["metrics"][metric] == (expected if exact else pytest.approx(expected, rel=1e-6))
    best = loss_of(path, strategy, "model-best.safetensors")
    assert result["best"]["value"] == (best if exact else pytest.approx(best, rel=1e-6))
    assert result["metrics"]["same"] == 1.0 and "ema_middle" in result["metrics"]
    return result


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_figures_are_those_of_one_process_and_all_have_measured(whole, strategy):
    path = whole / str(STRATEGIES.index(strategy))
    result = check(path, strategy)
    shares = [json.loads((path / f"measured-{rank}.json").read_text()) for rank in range(RANKS)]
    measured = [sum(share) > 0 for share in shares]
    assert sum(measured) == (1 if strategy in ALONE else RANKS - result["servers"])


def test_a_run_with_shared_validations_replays_to_the_bit(whole, tmp_path):
    path = whole / str(STRATEGIES.index("async()"))
    job = mt.Job(
        model=toy.normed, loss=toy.square_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
        data=toy.Memory(96), validate=toy.Memory(2100), epochs=2, batch_size=4, ema=0.5, validate_ema=True,
    )  # fmt: skip
    again = mt.simulate(job, replay=str(path), run_dir=str(tmp_path / "again"), quiet=True)
    metrics = json.loads((path / "result.json").read_text())["metrics"]
    assert again["replay_identical"] and again["metrics"].items() <= metrics.items()


@pytest.mark.parametrize("strategy", ["allreduce()", "async()", "localsgd(period=2)"])
def test_a_rank_that_dies_in_a_validation_costs_no_figure(strategy, tmp_path):
    launch_program(
        RANKS, "divided_validation", str(tmp_path), "2", json.dumps([strategy]), mpirun_args=ULFM, timeout_s=200
    ).check()  # fmt: skip
    result = check(tmp_path / "0", strategy)
    rows = [json.loads(line) for line in (tmp_path / "0" / "metrics.jsonl").read_text().splitlines()]
    validations = [row for row in rows if row["event"] == "validation"]
    assert result["lost"] == {"2": "died"} and result["samples"] == 2 * 96 and len(validations) >= 1
