"""Whole jobs on an accelerator whose memory the host cannot touch and whose streams are late (`simulated.cpp`): what
they make is what the host makes, to the bit, and what forgets to wait, reads by itself or mixes devices fails."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.devices import simulated
from tests.mpi.cases import Call, call
from tests.ranks import Result, find_mpi, run_plain, run_ranks

pytestmark = pytest.mark.skipif(bool(simulated.why_not()), reason=simulated.why_not())
PROGRAMS = Path(__file__).parent / "programs"
RANKS = 4
TOGETHER = ["allreduce()", "sync()", "localsgd(period=3)", "decentralized()", "pipeline(microbatches=3)"]
CODED = [
    "allreduce(codec=topk())",
    "sync(push_wire=threshold(density=0.2,dense_below=0),reply_wire='float16')",
]
NARROW = [
    "sync(servers=2,optimizer='worker')",
    "decentralized(topology='ring')",
]  # with masters on the device
MORE_TOGETHER = [
    "sync(servers=2)", "localsgd(period=3,outer=diloco())", "sharded()", "tensor()",
    "sync(aggregate='node')",
]  # fmt: skip
MORE_CODED = [
    "allreduce(codec=powersgd(rank=2))", "sync(push_wire='bfloat16',reply_wire='float16')",
    "localsgd(period=3,wire='int8')", "decentralized(codec=eightbit())",
]  # fmt: skip
# Of one worker, whose order of updates is its own.
ALONE = [
    "async()", "async(inflight=2)", "ssp(bound=1)", "softsync(updates=1)", "elastic(push_every=2)",
    "async(optimizer='worker',push_every=2,pull_every=2)", "async(damping=delay_compensated())",
]  # fmt: skip
RESUMED = "localsgd(period=3,outer=slowmo())"
THREADED = ["sync()", "allreduce()"]


def command_of(program: str, path: Path, calls: list[Call]) -> list[str]:
    """What runs `programs/<program>.py`."""
    simulated.build()
    return [str(find_mpi()[0]), str(PROGRAMS / f"{program}.py"), str(path), json.dumps(calls)]


def call_on(
    num_ranks: int, path: Path, calls: list[Call], program: str = "simulated_jobs", **env: str
) -> Result:
    """Run it on so many ranks."""
    return run_ranks(num_ranks, command_of(program, path, calls), env=env)


def both(strategies: list[str], *arguments: str) -> list[Call]:
    return [
        call("run", f"{kind}-{text}", text, kind, *arguments)
        for text in strategies
        for kind in ("cpu", "sim")
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("simulated")
    call_on(RANKS, path, both(TOGETHER) + both(CODED, "single") + both(NARROW, "narrow")).check()
    return path


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, calls = tmp_path_factory.mktemp("simulated"), []
    for first, then in (("cpu", "cpu"), ("sim", "sim"), ("cpu", "sim")):
        calls.append(call("run", f"{first}-{then}", RESUMED, first, epochs=1))
        calls.append(call("run", f"{first}-{then}", RESUMED, then, resume="auto"))
    call_on(RANKS, path, calls).check()
    return path


@pytest.fixture(scope="module")
def more_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("simulated")
    calls = both(MORE_TOGETHER) + both(MORE_CODED, "single")
    calls += [call("run", f"{kind}-normed", "sync(servers=2)", kind, "normed") for kind in ("cpu", "sim")]
    call_on(RANKS, path, calls).check()
    call_on(2, path, both(ALONE)).check()
    return path


def check_same(path: Path, found: str, expected: str) -> None:
    assert json.loads((path / found / "result.json").read_text())["device"] == simulated.NAME
    models = [load_file(path / name / "model.safetensors") for name in (found, expected)]
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[1])


@pytest.mark.parametrize("strategy", TOGETHER + CODED + NARROW)
def test_a_job_makes_the_bits_of_the_host(runs: Path, strategy: str) -> None:
    check_same(runs, f"sim-{strategy}", f"cpu-{strategy}")


@pytest.mark.extended
@pytest.mark.parametrize("first", ["sim", "cpu"])
def test_a_run_goes_on_from_a_checkpoint_of_either(resumed: Path, first: str) -> None:
    check_same(resumed, f"{first}-sim", "cpu-cpu")


def test_who_does_not_wait_exchanges_what_is_not_there_yet(tmp_path: Path) -> None:
    steps = ["begin", ("add_up", "whole"), "no_wait_for_kernels", ("add_up", "kernels"), "no_wait_for_copies"]
    steps += [("add_up", "copies"), "end"]
    calls = [call(*((one,) if isinstance(one, str) else one)) for one in steps]
    for said in call_on(2, tmp_path, calls, "simulated_breaks", MPITRAIN_GPU_BUFFERS="off").check().ranks_out:
        assert said.split("\n")[:3] == ["whole: right", "kernels: wrong", "copies: wrong"]


def test_the_address_of_its_memory_is_none_that_the_host_may_read(tmp_path: Path) -> None:
    steps = [call("begin"), call("read_directly")]  # small sums go by way of the host where a doorbell rings
    env = {"MPITRAIN_GPU_BUFFERS": "on", "MPITRAIN_DOORBELL": "off"}
    found = call_on(2, tmp_path, steps, "simulated_breaks", **env)
    assert found.code != 0 and "directly: " not in found.stdout
    assert "simulated accelerator: the host touched memory of device" in found.stderr


def test_a_batch_on_another_device_than_the_model_ends_the_job(tmp_path: Path) -> None:
    found = call_on(2, tmp_path, [call("train_on_another")], "simulated_breaks")
    assert found.code == 1 and "rank 1" in found.stderr
    assert (
        "Expected all tensors to be on the same device" in found.stderr or "must lie on one" in found.stderr
    )


@pytest.fixture(scope="module")
def in_threads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Workers of one process, which take its two devices in turn."""
    path = tmp_path_factory.mktemp("simulated")
    calls = [
        call("run", f"{kind}-{text}", text, kind, threads=3) for text in THREADED for kind in ("cpu", "sim")
    ] + [call("predict", f"cpu-{THREADED[0]}", kind) for kind in ("cpu", "sim")]
    run_plain(command_of("simulated_jobs", path, calls))
    return path


@pytest.mark.extended
@pytest.mark.parametrize("strategy", THREADED)
def test_workers_that_are_threads_make_the_bits_of_the_host(in_threads: Path, strategy: str) -> None:
    check_same(in_threads, f"sim-{strategy}", f"cpu-{strategy}")


@pytest.mark.extended
def test_what_is_predicted_is_what_the_host_predicts(in_threads: Path) -> None:
    found, expected = (h5py.File(in_threads / f"{kind}.h5")["prediction"][:] for kind in ("sim", "cpu"))
    assert np.array_equal(found, expected) and len(found) == 48


@pytest.mark.extended
@pytest.mark.parametrize("strategy", MORE_TOGETHER + MORE_CODED + ALONE + ["normed"])
def test_every_other_family_makes_the_bits_of_the_host(more_runs: Path, strategy: str) -> None:
    check_same(more_runs, f"sim-{strategy}", f"cpu-{strategy}")
