"""The progress engine (`programs/engine_cases.py`) over shared memory, over TCP, and under MPICH."""

import pytest

from tests.mpi.cases import TCP, assert_passed, case_names, launch


@pytest.fixture(scope="module")
def shared_memory():
    return launch(3, "engine_cases")


@pytest.fixture(scope="module")
def tcp():
    return launch(2, "engine_cases", mpirun_args=TCP)


@pytest.fixture(scope="module")
def mpich():
    return launch(3, "engine_cases", mpi="mpich")


@pytest.mark.parametrize("case", case_names("engine_cases"))
def test_over_shared_memory(shared_memory, case):
    assert_passed(shared_memory, case)


@pytest.mark.parametrize("case", case_names("engine_cases"))
def test_over_tcp(tcp, case):
    assert_passed(tcp, case)


@pytest.mark.extended  # `make test-mpich` runs all of them, too
@pytest.mark.parametrize("case", case_names("engine_cases"))
def test_under_mpich(mpich, case):
    assert_passed(mpich, case)


def test_all_launches_end_cleanly(shared_memory, tcp):
    shared_memory.check()
    tcp.check()
