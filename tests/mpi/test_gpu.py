"""What needs a GPU: device tensors over MPI, and every family of strategies on the device beside the same on the host.

On a machine with one GPU all ranks share it. `make gpu` runs this file (`tests/gpu.py`), and then the other tests with
the GPU in sight; `make gpu ARGS=--simulated` rehearses it on the simulated accelerator.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.devices import tested
from tests.mpi.cases import assert_passed, call, case_names, launch, launch_calls
from tests.ranks import find_mpi, run_ranks

KIND = tested.kind()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(KIND is None, reason="no accelerator")]
not_simulated = pytest.mark.skipif(tested.is_simulated(), reason="says nothing of the simulated accelerator")
CASES = case_names("gpu_cases")
TOGETHER = [
    "allreduce()", "sync()", "localsgd(period=3)", "localsgd(period=3,outer=diloco())", "sharded()", "tensor()",
    "decentralized()",
]  # fmt: skip
# Of one worker, whose order of updates is its own, or of two ranks.
ALONE = [
    "async()", "async(inflight=2)", "ssp(bound=1)", "softsync(updates=1)", "elastic(push_every=2)",
    "async(optimizer='worker',push_every=2,pull_every=2)", "async(damping=delay_compensated())",
    "async(push_wire='bfloat16',reply_wire='float16')", "pipeline(microbatches=3)",
]  # fmt: skip
RACING = [
    "async()",
    "async(servers=2,inflight=2)",
    "ssp(bound=1)",
    "softsync(updates=2)",
    "elastic(push_every=2)",
]
WIRES = [
    "sync(push_wire='bfloat16',reply_wire='float16')", "allreduce(codec=powersgd(rank=2))", "allreduce(codec=topk())",
    "async(push_wire=threshold(density=0.2,dense_below=0),reply_wire=eightbit(dense_below=0))",
    "localsgd(period=3,wire='int8')", "decentralized(codec=eightbit())",
]  # fmt: skip
SIXTEEN = ["allreduce()", "sync()", "localsgd(period=3)"]
RESUMED = "localsgd(period=3,outer=slowmo())"
RESUMES = [(KIND, KIND), (KIND, "cpu"), ("cpu", KIND)]
RANKS = 4
SLOW = 0.01  # so that the order of updates matters little


@pytest.fixture(scope="module", params=["auto", "off"])
def cases(request):
    """As the MPI can, and by way of the host."""
    env = tested.for_ranks() | {"MPITRAIN_GPU_BUFFERS": request.param}
    return launch(2, "gpu_cases", env=env, timeout_s=200)


@pytest.mark.parametrize("case", CASES)
def test_device_tensors(cases, case):
    assert_passed(cases, case)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    path, calls = tmp_path_factory.mktemp("gpu"), []
    for device in ("cpu", KIND):
        calls += [call("run", f"{device}-{text}", text, device) for text in TOGETHER]
        calls += [call("run", f"{device}-{text}", text, device, "float32", lr=SLOW) for text in WIRES]
    calls += [call("run", f"racing-{text}", text, KIND, lr=SLOW) for text in RACING]
    for kind in ("float16", "bfloat16", "float32"):
        calls += [call("run", f"{kind}-{text}", text, KIND, kind, lr=SLOW) for text in SIXTEEN]
    for first, then in RESUMES:
        name = f"resumed-{first}-{then}"
        calls += [
            call("run", name, RESUMED, first, epochs=1),
            call("run", name, RESUMED, then, resume="auto"),
        ]
    calls.append(call("run", "whole", RESUMED, KIND))
    launch_calls(RANKS, "gpu_jobs", path, calls, timeout_s=400, env=tested.for_ranks()).check()
    single = {text: "float32" if "wire" in text else None for text in ALONE}
    two = [call("run", f"{one}-{text}", text, one, single[text]) for text in ALONE for one in ("cpu", KIND)]
    launch_calls(2, "gpu_jobs", path, two, env=tested.for_ranks()).check()
    return path


def result(path, name):
    return json.loads((path / name / "result.json").read_text())


def loss(found):
    return found["metrics"]["validation_loss"]


def model(path, name):
    return load_file(path / name / "model.safetensors")


@pytest.mark.parametrize("strategy", TOGETHER + ALONE)
def test_what_is_no_race_makes_the_model_of_the_host(runs, strategy):
    """To rounding: of float64, and of float32 or what the wire leaves of it."""
    assert result(runs, f"{KIND}-{strategy}")["device"] == KIND
    assert result(runs, f"cpu-{strategy}")["device"] == "cpu"
    found, expected = (model(runs, f"{device}-{strategy}") for device in (KIND, "cpu"))
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if "wire" in strategy else {"rtol": 1e-6, "atol": 1e-8}
    torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize("strategy", WIRES)
def test_what_codecs_choose_trains_as_well_as_on_the_host(runs, strategy):
    found, expected = (result(runs, f"{device}-{strategy}") for device in (KIND, "cpu"))
    assert found["device"] == KIND and found["samples"] == expected["samples"]
    assert loss(found) == pytest.approx(loss(expected), rel=0.5)


@pytest.mark.parametrize("strategy", RACING)
def test_workers_that_race_train_on_every_sample(runs, strategy):
    found = result(runs, f"racing-{strategy}")
    assert (found["device"], found["samples"]) == (KIND, 62) and loss(found) < 10


@pytest.mark.parametrize("strategy", SIXTEEN)
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_sixteen_bits_train_as_well_as_thirty_two(runs, strategy, precision):
    found, expected = (result(runs, f"{one}-{strategy}") for one in (precision, "float32"))
    assert found["precision"] == precision and loss(found) == pytest.approx(loss(expected), rel=0.2)


@pytest.mark.parametrize(("first", "then"), RESUMES)
def test_a_resume_may_change_the_device(runs, first, then):
    found, expected = model(runs, f"resumed-{first}-{then}"), model(runs, "whole")
    if first == then:
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


@not_simulated
def test_who_is_to_compute_on_the_host_leaves_the_gpu_alone(tmp_path):
    calls = [call("run", "host", "async(servers=2)", "cpu", lr=SLOW), call("contexts")]
    out = launch_calls(RANKS, "gpu_jobs", tmp_path, calls).check()
    assert all(text.endswith("no context\n") for text in out.ranks_out), out


@not_simulated
def test_whether_mpi_carries_device_memory_is_told_without_a_crash(tmp_path):
    """The library is asked first, and what it says it can do is tried."""
    python = str(find_mpi("openmpi")[0])
    told = run_ranks(2, [python, "-m", "mpitrain", "doctor", "--gpu-mpi"], cwd=tmp_path)
    expected = {0: "fit: MPITRAIN_GPU_BUFFERS=on may be set", 4: "unfit: MPIX_Query_"}
    assert told.code in expected and expected[told.code] in told.stdout + told.stderr, told
