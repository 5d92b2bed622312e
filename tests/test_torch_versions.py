"""What the package says of a torch that it was not tried with, and what of torch is asked for by another name."""

import functools
import re
from types import SimpleNamespace

import pytest
import torch

from mpitrain import torch_versions
from mpitrain.errors import UsageError
from mpitrain.training.model_parallel import whole_matrices
from tests.ranks import find_mpi, run_ranks

START = """
import sys, torch
torch.__version__ = sys.argv[1]
from mpitrain.mpi.runtime import start
start()
start()
"""


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("2.8.0", ""),
        ("2.8.0+cu128", ""),
        ("2.10.0a0+git1234", ""),
        ("2.15.9", ""),
        ("2.7.1", "older"),
        ("2.16.0", "newer"),
        ("3.0", "newer"),
        ("10.1.0+rocm9", "newer"),
    ],
)
def test_versions_outside_what_was_tried_are_said(text, word):
    line = torch_versions.untried(text)
    assert bool(line) == bool(word) and word in line
    if word:
        assert text in line and "2.8 to 2.15" in line and "\n" not in line


def test_one_line_a_launch_and_it_goes_on(tmp_path):
    (tmp_path / "start.py").write_text(START)
    for version, num_lines in (("2.99.1+cpu", 1), (torch.__version__, 0)):
        result = run_ranks(2, [str(find_mpi()[0]), str(tmp_path / "start.py"), version]).check()
        told = [text.count("mpitrain was tried with") for text in result.ranks_err]
        assert told == [num_lines, 0], result


def test_a_torch_whose_muon_cannot_be_kept_to_whole_matrices_is_named(monkeypatch):
    monkeypatch.setattr(whole_matrices, "is_muon", lambda optimizer: True)
    monkeypatch.setattr(whole_matrices, "muon_iteration", lambda: None)
    with pytest.raises(UsageError, match=f"Muon of torch {re.escape(torch.__version__)} cannot be kept"):
        whole_matrices.check_muon(torch.optim.SGD([torch.zeros(1)]))


def test_what_has_no_public_name_is_there():
    for name in torch_versions._WITHOUT_PUBLIC_NAME:
        assert getattr(torch_versions, name) is not None, name
    with pytest.raises(AttributeError, match="has no Muon"):
        _ = torch_versions.Muon
    assert torch_versions.dtypes(["float32", "no_such", "nn"]) == {"float32": torch.float32}


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.int64)])
def test_a_pipeline_begins_without_the_numbers_that_its_neighbours_do_not_expect(dtypes, monkeypatch):
    """torch 2.9's stages send 8 bytes to where 4 are expected."""
    greetings = [SimpleNamespace(tensor=torch.zeros(1, dtype=dtype)) for dtype in dtypes]
    stage = SimpleNamespace(num_stages=2, _get_init_p2p_neighbors_ops=lambda: greetings)
    _, sent = torch_versions.make_schedule(
        lambda stage, count: (stage, stage._get_init_p2p_neighbors_ops()), stage, 2
    )
    assert sent == (greetings if len(set(dtypes)) == 1 else [])
    without = SimpleNamespace(num_stages=2)  # as in 2.8
    assert torch_versions.make_schedule(lambda stage, count: stage, without, 2) is without
    for version, told in (("2.9.1", "pipeline()"), ("2.13.0", "")):
        monkeypatch.setattr(torch, "__version__", version)
        assert told in torch_versions.warm_up_fault() and bool(told) == bool(torch_versions.warm_up_fault())


class OwnSGD(torch.optim.SGD):
    """Whatever it does in its step stays."""

    def step(self, closure=None):
        return super().step(closure)


def test_a_step_is_taken_alone_where_it_is_known_what_torch_puts_around_it(monkeypatch):
    def made(kind, **options):
        return kind([torch.nn.Parameter(torch.ones(2))], lr=0.5, **options)

    watched = made(torch.optim.SGD)
    watched.register_step_pre_hook(lambda *arguments: pytest.fail("a hook of the worker's"))
    (parameter,) = watched.param_groups[0]["params"]
    parameter.grad = torch.ones(2)
    step = torch_versions.step_alone(watched)
    assert step is not None and not hasattr(step.func, "__wrapped__")
    with torch.no_grad():
        step()
    assert parameter.tolist() == [0.5, 0.5]
    replaced = made(torch.optim.SGD)
    replaced.step = lambda: None
    for other in (made(OwnSGD), made(torch.optim.Adam, differentiable=True), replaced):
        assert torch_versions.step_alone(other) is None
    torchs = torch.optim.SGD.step

    @functools.wraps(torchs)
    def watching(*arguments, **options):
        return torchs(*arguments, **options)

    monkeypatch.setattr(torch.optim.SGD, "step", watching)  # as tools do that count steps
    assert torch_versions.step_alone(watched) is None
