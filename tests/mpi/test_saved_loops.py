"""A loop of one's own that saves and is resumed: bit for bit what it would have been."""

import pytest
import torch
from safetensors.torch import load_file

from mpitrain.checkpoint.parts import folder_of, newest, write_part
from mpitrain.system.run_directory import Identity
from mpitrain.training.measure import same_model
from tests.ranks import run_ranks

# Each launch trains whole and resumed where there are no servers, for these leave the process inside `wrap`.
PROGRAM = """
from pathlib import Path
import torch
import mpitrain as mt
from mpitrain.wrapping import loop
from mpitrain.mpi.process_group.process_group import leave_default_group
from mpitrain.mpi.runtime import start
from mpitrain.values import parse
from mpitrain.training.measure import save_model
from tests import toy

runtime, reader = start(), toy.Memory(num_samples=128).reader(None, 0)

def normed():
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(7, 1)
    )

def still(parameters):
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9, weight_decay=1e-3)

def train(name, text, optimizer, saves, resume=None, last=12):
    torch.manual_seed(3)
    inner = model = normed()
    loop._wrapped = None
    made = (globals().get(optimizer) or getattr(toy, optimizer))(model.parameters())
    model, optimizer = mt.wrap(model, made, parse(text, "strategy"), resume and "{path}/" + resume)
    begun = mt.resumed()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    if begun is not None:
        schedule.load_state_dict(begun.state["schedule"])
    for step in range(begun.step if begun else 0, last):
        batch = reader.batch(0, 8 * step + 4 * mt.worker_index(), 4)
        torch.manual_seed(step * 100 + mt.worker_index())
        optimizer.zero_grad()
        toy.square_loss(model, batch).backward()
        optimizer.step()
        schedule.step()
        if saves and step + 1 == 5:
            told = {{"schedule": schedule.state_dict(), "worker": mt.worker_index()}}
            mt.save("{path}/" + name, 5, told)
    if begun is not None:
        assert (begun.step, begun.state["worker"]) == (5, mt.worker_index()), begun
    mt.finish()
    save_model(inner, Path("{path}") / f"{{name}}-{{mt.worker_index()}}.safetensors", {{}})
    if torch.distributed.is_initialized():
        leave_default_group(runtime)

{runs}
"""
ALONE = {
    "allreduce": ("allreduce(codec=threshold(density=0.2,dense_below=0))", "sgd"),
    "localsgd": ("localsgd(period=2,outer=diloco())", "adam"),  # saved in the middle of a period
    "exponential": ("decentralized(topology='exponential')", "adam"),
    "full": ("decentralized(codec=threshold(density=0.2,dense_below=0),resync=4)", "sgd"),
}
SERVED = {
    "sync": (4, "sync(servers=2,push_wire=threshold(density=0.2,dense_below=0))", "two_groups"),
    "async": (2, "async(damping=inverse(),push_every=2)", "sgd"),
}


def calls(name, text, optimizer):
    whole = f"train('{name}-whole', {text!r}, {optimizer!r}, False)"
    return [whole, whole.replace("-whole", "").replace("False", "True")], (
        f"train('{name}-resumed', {text!r}, {optimizer!r}, False, {name!r})"
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    for name in [*ALONE, *SERVED]:  # an earlier run has come further
        write_part(folder_of(path / name, 99), "shard-0", {}, Identity("earlier", "a"), ["shard-0"], {})

    def launch(ranks, runs):
        run_ranks(ranks, PROGRAM.format(path=path, runs="\n".join(runs))).check()

    alone = []
    for name, row in ALONE.items():
        begins, goes_on = calls(name, *row)
        alone += [*begins, goes_on]
    for last in (6, 12):
        alone.append(f"train('still-{last}', 'allreduce()', 'still', False, 'plain', {last})")
    alone.insert(0, "train('plain', 'allreduce()', 'sgd', True)")
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
