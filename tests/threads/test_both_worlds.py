"""Threads and ranks over MPI: the same bits where sums are exact, and each goes on from what the other has written."""

import functools
import json

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from tests.mpi.cases import launch_program
from tests.threads.course import BEGUN, IN_16_BITS, WHOLE, dyadic_job, strategy_of, until_complete

RANKS = 4
EXACT = (
    "allreduce()",
    "sync(servers=2)",
    "localsgd(period=2,average_optimizer=True)",
    "decentralized(codec=none())",
    f"sync(servers=2){IN_16_BITS}",
    f"decentralized(topology='ring'){IN_16_BITS}",
)
OTHERS = ("async(servers=2)", "softsync(updates=2,servers=2)", "elastic(push_every=2,servers=2)")


def train(text, path, **options):
    strategy = strategy_of(text)
    threads = RANKS - strategy.num_servers()
    return mt.train(dyadic_job(text), strategy, threads=threads, run_dir=str(path), quiet=True, **options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By strategy, the folder of its runs."""
    path = tmp_path_factory.mktemp("both")
    folders = {text: path / str(index) for index, text in enumerate((*EXACT, *OTHERS))}
    for text, folder in folders.items():
        train(text, folder / "threads", epochs=WHOLE)
        begun = folder / "threads-begin"
        until_complete(functools.partial(train, text, begun, epochs=BEGUN), begun)
    launch_program(RANKS, "both_worlds", str(path), *folders).check()
    for text, folder in folders.items():
        train(text, folder / "threads-end", epochs=WHOLE, resume=str(folder / "ranks-begin"))
    for text in EXACT:
        strategy, simulated = strategy_of(text), str(folders[text] / "virtual")
        workers = RANKS - strategy.num_servers()
        mt.simulate(dyadic_job(text), strategy, workers, run_dir=simulated, epochs=WHOLE, quiet=True)
    return folders


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("text", EXACT)
@pytest.mark.parametrize("kind", ["threads", "virtual", "threads-end", "ranks-end"])
def test_threads_and_virtual_time_have_the_bits_of_ranks_and_each_goes_on_from_the_other(runs, text, kind):
    expected, found = weights(runs[text] / "ranks"), weights(runs[text] / kind)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("text", OTHERS)
@pytest.mark.parametrize("kind", ["threads-end", "ranks-end"])
def test_each_goes_on_from_what_the_other_has_left_to_chance(runs, text, kind):
    found = json.loads((runs[text] / kind / "result.json").read_text())
    assert found["samples"] == WHOLE * 48 and found["resumed_from"]
