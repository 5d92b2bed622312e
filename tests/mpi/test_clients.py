"""What programs that know nothing of us ask of the process group (`programs/client_cases.py`)."""

import pytest

from tests.mpi.cases import assert_passed, case_names, launch, launch_program
from tests.ranks import find_mpi, is_intel, is_old, needs_open_mpi, run_ranks
from tests.sampling import asked_for, sampled

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
def mpich(request):
    asked = sorted(asked_for(request, "of_mpich") - {None}, key=CASES.index)
    return launch(2, "client_cases", asked, mpi="mpich")


@pytest.mark.parametrize("case", CASES)
def test_on_three_ranks(three, case):
    assert_passed(three, case)


@pytest.mark.parametrize("of_mpich", sampled(CASES, CASES[::3]))
def test_under_mpich(mpich, of_mpich):
    assert_passed(mpich, of_mpich)


def test_launches_end_cleanly(three, mpich):
    for result in (three, mpich):
        result.check()


def test_a_message_that_nobody_receives_does_not_hold_the_end():
    needs_open_mpi("MPICH ends the job itself, in the Finalize of the rank that was to receive")
    if is_old(find_mpi()[1]):
        pytest.skip("Open MPI 4: no MPI_Ibarrier ends beside a send of 40 MB that nobody receives")
    result = run_ranks(2, NOBODY_RECEIVES)
    assert result.code == 2 and "no rank has asked for: a send to rank 1, tag 0" in result.stderr, result


@pytest.mark.parametrize(
    ("mpi", "level", "obtained", "warned"),
    [
        (
            "openmpi",
            ("single", "early"),
            "single",
            "THREAD_SINGLE on all ranks, which promises it that one thread alone",
        ),
        (
            "mpich",
            ("funneled",),
            "funneled",
            "THREAD_FUNNELED on all ranks, which promises it that one thread alone",
        ),
        (
            "openmpi",
            ("unset", "early"),
            "multiple",
            "THREAD_MULTIPLE on all ranks before mpitrain could ask for less",
        ),
        ("mpich", ("unset",), "serialized", ""),
    ],
)
def test_a_programs_own_mpi_is_as_it_was_and_a_wrong_thread_level_warned_of_once(
    mpi, level, obtained, warned
):
    result = launch_program(2, "mpi_of_its_own", *level, mpi=mpi)
    if (
        mpi == "mpich" and warned and is_intel("mpich")
    ):  # of which it is not known that it bears a second thread
        assert result.code == 2 and warned in result.stderr, result
        return
    result.check()
    assert result.ranks_out == (f"{obtained}\n",) * 2
    assert result.stderr.count("UserWarning") == bool(warned) and warned in result.stderr, result
    assert not warned or "MPI4PY_RC_THREAD_LEVEL=serialized" in result.stderr
