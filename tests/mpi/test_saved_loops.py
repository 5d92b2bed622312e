"""A loop of one's own that saves and is resumed: bit for bit what it would have been."""

import pytest
import torch
from safetensors.torch import load_file

from mpitrain.checkpoint.parts import folder_of, newest, write_part
from mpitrain.system.files.run_directory import Identity
from mpitrain.training.measure import same_model
from tests.mpi.cases import call, launch_calls

# Each launch trains whole and resumed where there are no servers, for these leave the process inside `wrap`.
ALONE = {
    "allreduce": ("allreduce(codec=threshold(density=0.2,dense_below=0))", "sgd"),
    "localsgd": ("localsgd(period=2,outer=diloco())", "adam"),  # saved in the middle of a period
    "exponential": ("decentralized(topology='exponential')", "adam"),
    "exponential in 16 bits": ("decentralized(topology='exponential')", "adam"),
    "full": ("decentralized(codec=threshold(density=0.2,dense_below=0),resync=4)", "sgd"),
}
SERVED = {
    "sync": (4, "sync(servers=2,push_wire=threshold(density=0.2,dense_below=0))", "two_groups"),
    "async": (2, "async(damping=inverse(),push_every=2)", "sgd"),
}


def calls(name, text, optimizer):
    begins = [
        call("train", f"{name}-whole", text, optimizer, False),
        call("train", name, text, optimizer, True),
    ]
    return begins, call("train", f"{name}-resumed", text, optimizer, False, name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    for name in [*ALONE, *SERVED]:  # an earlier run has come further
        write_part(folder_of(path / name, 99), "shard-0", {}, Identity("earlier", "a"), ["shard-0"], {})

    def launch(ranks, runs):
        launch_calls(ranks, "saved_loops", path, runs).check()

    alone = []
    for name, row in ALONE.items():
        begins, goes_on = calls(name, *row)
        alone += [*begins, goes_on]
    for last in (6, 12):
        alone.append(call("train", f"still-{last}", "allreduce()", "still", False, "plain", last))
    alone.insert(0, call("train", "plain", "allreduce()", "sgd", True))
    for name, (ranks, *row) in SERVED.items():
        (_, begins), goes_on = calls(name, *row)
        launch(ranks, [*(alone if ranks == 4 else []), begins])
        launch(ranks, [goes_on])
    return path


@pytest.mark.parametrize("name", [*ALONE, *SERVED])
def test_what_is_resumed_is_what_would_have_been(saved, name):
    """Without servers also what it would have been had it never been saved."""
    found = newest(saved / name)
    assert (
        found is not None
        and found.checkpoint_at == 5
        and newest(saved / name / "earlier-earlier").checkpoint_at == 99
    )
    for worker in range({"async": 1, "sync": 2}.get(name, 4)):
        resumed = saved / f"{name}-resumed-{worker}.safetensors"
        assert same_model(saved / f"{name}-{worker}.safetensors", resumed)
        assert name in SERVED or same_model(saved / f"{name}-whole-{worker}.safetensors", resumed)


def test_a_rate_that_the_script_sets_on_resume_acts(saved):
    """torch's own way would bring the saved rate back: here a rate of 0 moves no parameter, however many steps."""
    few, many = (load_file(saved / f"still-{last}-0.safetensors") for last in (6, 12))
    trained = [name for name in few if name.endswith(("weight", "bias"))]
    assert all(torch.equal(few[name], many[name]) for name in trained)
    assert not torch.equal(few["0.weight"], load_file(saved / "plain-0.safetensors")["0.weight"])
