"""`import torch` alone knows the backend "mpi4py": what that loads, in every order of imports, and what scripts get."""

import os
import subprocess
import sys

import pytest

from mpitrain import torch_backend
from tests.mpi.cases import PROGRAMS
from tests.ranks import run_ranks
from tests.sampling import sampled

KNOWN = """
import sys
ours = sorted(name for name in sys.modules if name.partition(".")[0] in ("mpitrain", "mpi4py"))
import torch.distributed as dist
print("mpi4py" in dist.Backend.backend_list, *ours)
"""
LOADED = "True mpitrain mpitrain.torch_backend mpitrain.torch_versions"


def python(text, **env):
    done = subprocess.run(
        [sys.executable, "-c", text], env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "imports",
    sampled(
        ["import torch", "import torch.distributed", "import mpitrain, torch", "import torch, mpitrain"],
        ["import torch.distributed"],
    ),
)
def test_torch_knows_the_backend_and_loads_two_small_files(imports):
    assert python(imports + KNOWN) == LOADED


@pytest.mark.extended
def test_without_autoload_our_own_import_is_enough():
    assert python("import torch" + KNOWN, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False"
    assert python("import mpitrain, torch" + KNOWN, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == LOADED
    assert python("import torch, mpitrain" + KNOWN, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == LOADED


def test_an_error_of_ours_is_a_warning_and_torch_is_imported():
    planted = """
import warnings, mpitrain.torch_backend as ours
def register():
    raise OSError("planted")
ours.register = register
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import torch
print(torch.ones(2).sum().item(), sum("planted" in str(each.message) for each in told) > 0)
"""
    assert python(planted) == "2.0 True"


@pytest.mark.parametrize(
    ("asked", "given", "meant"),
    [
        ("gloo", "gloo", "mpi4py"),
        ("gloo", "cpu:gloo", "mpi4py"),
        ("gloo", "cpu:gloo,cuda:mpi4py", "mpi4py"),
        ("gloo", "cpu:gloo,cuda:nccl", "cpu:mpi4py,cuda:nccl"),
        ("gloo,mpi", "MPI", "mpi4py"),
        ("gloo", "nccl", "nccl"),
        ("", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("gloo", None, None),
    ],
)
def test_what_the_environment_replaces(monkeypatch, asked, given, meant):
    monkeypatch.setenv(torch_backend.REPLACES, asked)
    assert torch_backend._replaced(given) == meant


def test_a_script_that_does_not_know_of_us():
    result = run_ranks(2, [sys.executable, str(PROGRAMS / "zero_lines.py")], warm=False).check()
    told = "mpi4py 2; gloo 2; mpi4py 2; mpi4py 2; gloo 2; mpi 2; "
    told += (
        "cpu:mpi4py,cuda:gloo 2; cpu:gloo,cuda:mpi4py 2; cpu:mpi4py,cuda:gloo 2; cpu:gloo,cuda:gloo 2; gloo 2"
    )
    # gloo of torch 2.8 says there how many ranks it has reached
    own = [[line for line in text.splitlines() if "[Gloo]" not in line] for text in result.ranks_out]
    assert own == [[told]] * 2, result
