"""Jobs that people have, against plain torch in one process: BatchNorm, tied weights, frozen layers, groups with
different rates, packed sequences, dropout. One worker is bit for bit the serial loop; several take its mean gradient.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.values import parse
from tests import small_jobs, toy
from tests.mpi.cases import launch_program

ALONE = ("async()", "async(servers=2)", "sync()", "localsgd(period=2)")
# workers that send what their step has changed: it is added to what it was taken from, and so rounded
ALONE_ROUNDED = ('sync(optimizer="worker")', "decentralized()")
TOGETHER = ("allreduce()", "localsgd(period=1)", "sharded()")
# the mean of steps of AdamW is no step of AdamW
NOT_LINEAR = (("groups by name", "localsgd(period=1)"), ("groups by name", 'sync(optimizer="worker")'))
# whose workers' draws and statistics are their own, so that who computes what decides
EACH_ITS_OWN = ("batch norm", "dropout")
LINEAR = [
    (name, text)
    for name in small_jobs.JOBS
    for text in (*TOGETHER, "sync()", "sync(servers=2)", 'sync(optimizer="worker")')
    if (name, text) not in NOT_LINEAR
]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    path = tmp_path_factory.mktemp("two")
    runs = {f"{job} {text}": (job, text, 6) for job, text in LINEAR if text in TOGETHER}
    launch_program(2, "small_runs", str(path), json.dumps(runs), cwd=path, timeout_s=300).check()
    return path


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    path = tmp_path_factory.mktemp("one")
    runs = {f"{job} allreduce()": (job, "allreduce()", 12) for job in small_jobs.JOBS}
    launch_program(1, "small_runs", str(path), json.dumps(runs), cwd=path, timeout_s=300).check()
    return path


@pytest.fixture(scope="module")
def serial():
    found = {}

    def of(name):
        if name not in found:
            found[name] = toy.serial(small_jobs.job(name))
        return found[name]

    return of


def simulated(tmp_path, name, text, workers=1, batch_size=12):
    result = mt.simulate(
        small_jobs.job(name, batch_size), parse(text, "strategy"), workers=workers, quiet=True,
        run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    assert result["status"] == "ok"
    return load_file(tmp_path / "run" / "model.safetensors")


@pytest.mark.parametrize("text", ALONE)
@pytest.mark.parametrize("name", small_jobs.JOBS)
def test_one_worker_is_the_serial_loop_to_the_bit(name, text, serial, tmp_path):
    found, expected = simulated(tmp_path, name, text), serial(name)
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


@pytest.mark.parametrize("name", small_jobs.JOBS)
def test_one_rank_is_the_serial_loop_to_the_bit(name, serial, one):
    found, expected = load_file(one / f"{name} allreduce()" / "model.safetensors"), serial(name)
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


@pytest.mark.parametrize("text", ALONE_ROUNDED)
@pytest.mark.parametrize("name", small_jobs.JOBS)
def test_one_worker_whose_steps_travel_is_the_serial_loop(name, text, serial, tmp_path):
    close(simulated(tmp_path, name, text), serial(name))


@pytest.mark.parametrize(
    ("name", "text"), [one for one in LINEAR if one[1] not in TOGETHER and one[0] not in EACH_ITS_OWN]
)
def test_workers_that_share_a_batch_are_the_serial_loop(name, text, serial, tmp_path):
    found = simulated(tmp_path, name, text, workers=2, batch_size=6)
    close(found, serial(name))


@pytest.mark.parametrize(("name", "text"), [one for one in LINEAR if one[1] in TOGETHER])
def test_ranks_that_share_a_batch_are_one_process_with_the_mean_of_their_gradients(name, text, two):
    expected = small_jobs.by_ranks(small_jobs.job(name, 6), 2, average_buffers=text.startswith("localsgd"))
    close(load_file(two / f"{name} {text}" / "model.safetensors"), expected)


def close(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-10)


def test_what_is_tied_stays_tied(tmp_path):
    found = simulated(tmp_path, "tied weights", "async(servers=2)")
    assert torch.equal(found["embedding.weight"], found["output.weight"])


@pytest.mark.parametrize("name", [name for name in small_jobs.JOBS if name.startswith("frozen")])
def test_what_is_frozen_stays_as_it_was(name, tmp_path):
    found = simulated(tmp_path, name, "async()")
    torch.manual_seed(0)
    before = small_jobs.partly_frozen().state_dict()
    assert torch.equal(found["0.weight"], before["0.weight"])
    assert not torch.equal(found["2.weight"], before["2.weight"])


def test_sparse_gradients_are_refused_by_name_before_anything_is_trained(tmp_path):
    """Of strategies that send them whole. A layer without `sparse=True` is the same one: its rows that do not occur
    have gradients of zero."""
    with pytest.raises(UsageError, match=r"'embedding' is Embedding\(sparse=True\).*leave sparse=True out"):
        simulated(tmp_path, "sparse", "elastic()")
    found = simulated(tmp_path, "no longer sparse", "async()")
    expected = toy.serial(small_jobs.job("sparse"))
    close(found, expected)


@pytest.mark.extended
def test_workers_of_parameter_servers_never_import_the_compiler(tmp_path):
    """Which takes a second of CPU and 800 files of each rank; a server imports it when it takes a step."""
    found = launch_program(2, "compiler_unimported", str(tmp_path / "run"), cwd=tmp_path, warm=False).check()
    assert [text.splitlines()[-1] for text in found.ranks_out] == ["server True", "worker False"]
