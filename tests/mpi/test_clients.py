"""What programs that know nothing of us ask of the process group (`programs/client_cases.py`)."""

import pytest

from tests.mpi.cases import assert_passed, case_names, launch
from tests.ranks import run_ranks

CASES = case_names("client_cases")
NOBODY_RECEIVES = """
import torch, torch.distributed as dist, mpitrain
dist.init_process_group("mpi4py")
if dist.get_rank() == 0:
    work = dist.isend(torch.ones(10_000_000), 1)
"""


@pytest.fixture(scope="module")
def three():
    return launch(3, "client_cases")


@pytest.fixture(scope="module")
def mpich():
    return launch(2, "client_cases", mpi="mpich")


@pytest.mark.parametrize("case", CASES)
def test_on_three_ranks(three, case):
    assert_passed(three, case)


@pytest.mark.parametrize("case", CASES)
def test_under_mpich(mpich, case):
    assert_passed(mpich, case)


def test_launches_end_cleanly(three, mpich):
    for result in (three, mpich):
        result.check()


def test_a_message_that_nobody_receives_does_not_hold_the_end():
    result = run_ranks(2, NOBODY_RECEIVES)
    assert result.code == 2 and "no rank has asked for: a send to rank 1, tag 0" in result.stderr, result
