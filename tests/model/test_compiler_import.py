"""Optimizers made without torch's compiler: no sooner than it is needed, and torch is left as it was."""

import json
import subprocess
import sys

import pytest
import torch
from torch.optim import Optimizer

from mpitrain.model.building.compiler_import import KNOWN, without_compiler

PARAMETERS = "[torch.nn.Parameter(torch.ones(2))]"
MAKE = f"""
def compiler():
    return "torch._dynamo" in sys.modules

with without_compiler():
    made = torch.optim.Adam({PARAMETERS}, lr=0.5)
"""
STEPS = f"""
assert not compiler() and made.param_groups[0]["lr"] == 0.5
other = {PARAMETERS}
made.add_param_group({{"params": other}})
assert compiler(), "outside the block torch does what it always does"
for group in made.param_groups:
    group["params"][0].grad = torch.ones(2)
made.step()
assert all(torch.allclose(group["params"][0], torch.full((2,), 0.5)) for group in made.param_groups)
"""
FAILS = f"""
try:
    with without_compiler():
        torch.optim.Adam({PARAMETERS}, lr=-1.0)
except ValueError:
    pass
assert not compiler()
torch.optim.Adam({PARAMETERS})
assert compiler()
"""
MARKED = f"""
import torch._dynamo
add = torch.optim.Optimizer.add_param_group.__wrapped__
with without_compiler():
    torch.optim.Adam({PARAMETERS})
mark = getattr(add, "{KNOWN}")
with without_compiler():
    torch.optim.Adam({PARAMETERS})
    assert getattr(add, "{KNOWN}") is mark
assert getattr(add, "{KNOWN}") is mark
"""
WEIGHED = """
from mpitrain.strategies.allreduce import AllReduce
from mpitrain.training.memory import sizes_of
module = torch.nn.Linear(2, 2)
with without_compiler():
    made = torch.optim.Adam(module.parameters())
assert sizes_of(module, made, AllReduce()).optimizer == 2 * 4 * 6
assert not compiler()
"""
# Imports torch, which takes most of the time, and forks a process for each program.
FORKS = """
import json, os, sys, traceback, torch
from mpitrain.model.building.compiler_import import without_compiler
for number, program in enumerate(json.loads(sys.argv[1])):
    if (child := os.fork()) == 0:
        said = ""
        try:
            exec(program, {"sys": sys, "torch": torch, "without_compiler": without_compiler})
        except BaseException:
            said = traceback.format_exc()
        with open(f"{sys.argv[2]}/{number}", "w") as file:
            file.write(said)
        os._exit(0)
    os.waitpid(child, 0)
"""
PROGRAMS = [MAKE + program for program in (STEPS, FAILS, MARKED, WEIGHED)]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """The traceback of each program, empty where it has come to its end."""
    folder = tmp_path_factory.mktemp("programs")
    subprocess.run([sys.executable, "-c", FORKS, json.dumps(PROGRAMS), str(folder)], check=True)
    return [(folder / str(number)).read_text() for number in range(len(PROGRAMS))]


def test_an_optimizer_is_made_without_the_compiler_and_steps_as_usual(said):
    assert said[0] == ""


def test_a_block_that_fails_leaves_torch_as_it_was(said):
    assert said[1] == ""


def test_the_mark_is_kept_where_the_compiler_has_been_imported(said):
    """A compiled function that makes an optimizer breaks its graph there, as it does without us."""
    assert said[2] == ""


def test_what_memory_is_told_of_is_weighed_without_the_compiler(said):
    assert said[3] == ""


def test_a_compiler_that_is_imported_in_the_block_takes_its_mark_back(monkeypatch):
    add = Optimizer.add_param_group.__wrapped__
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    monkeypatch.delattr(add, KNOWN, raising=False)
    mark = object()
    with without_compiler():
        setattr(add, KNOWN, mark)
    assert vars(add).pop(KNOWN) is mark


def test_another_torch_is_left_alone(monkeypatch):
    """One whose method is not marked."""
    monkeypatch.setattr(Optimizer, "add_param_group", Optimizer.add_param_group.__wrapped__)
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    with without_compiler(), pytest.raises(ValueError, match="Invalid learning rate"):
        torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=-1.0)
