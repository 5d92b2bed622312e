"""The process group (`programs/group_cases.py`) on 4 ranks, on 2 over TCP, and on 3 under MPICH."""

import subprocess
import sys

import pytest

from tests.mpi.cases import TCP, assert_passed, case_names, launch
from tests.ranks import run_plain

CASES = case_names("group_cases")


@pytest.fixture(scope="module")
def four():
    return launch(4, "group_cases")


@pytest.fixture(scope="module")
def two_over_tcp():
    return launch(2, "group_cases", mpirun_args=TCP)


@pytest.fixture(scope="module")
def mpich():
    return launch(3, "group_cases", mpi="mpich")


@pytest.mark.parametrize("case", CASES)
def test_on_four_ranks(four, case):
    assert_passed(four, case)


@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks_over_tcp(two_over_tcp, case):
    assert_passed(two_over_tcp, case)


@pytest.mark.extended
@pytest.mark.parametrize("case", CASES)
def test_under_mpich(mpich, case):
    assert_passed(mpich, case)


def test_launches_end_cleanly(four, two_over_tcp):
    for result in (four, two_over_tcp):
        result.check()


@pytest.mark.parametrize(
    "order", ["import mpitrain, torch.distributed", "import torch.distributed, mpitrain"]
)
def test_importing_mpitrain_is_enough_to_register(order):
    code = f"{order}\nassert 'mpi4py' in torch.distributed.Backend.backend_list"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_importing_mpitrain_imports_neither_torch_nor_mpi():
    code = "import sys, mpitrain; assert not {'torch', 'mpi4py', 'numpy', 'h5py'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_one_rank_needs_no_launcher():
    """A script that says "mpi4py" runs as it is, by plain python, on one rank."""
    code = """
import torch, mpitrain, torch.distributed as dist
dist.init_process_group("mpi4py")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.ones(1, 2)).sum().backward()
assert [p.grad.tolist() for p in model.parameters()] == [[[1.0, 1.0]], [1.0]]
tensor = torch.ones(3, dtype=torch.bfloat16)
dist.all_reduce(tensor, dist.ReduceOp.AVG)
dist.barrier()
assert (dist.get_world_size(), tensor.tolist()) == (1, [1.0] * 3)
"""
    assert run_plain([sys.executable, "-c", code]) == ""
