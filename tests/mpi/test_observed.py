"""What torch 2.14 and later ask of a process group besides operations (`programs/observed_cases.py`)."""

from importlib.metadata import version

import pytest

from tests.mpi.cases import assert_passed, case_names, launch

OLD = tuple(map(int, version("torch").split("+")[0].split(".")[:2])) < (2, 14)
CASES = case_names("observed_cases")


@pytest.fixture(scope="module")
def two():
    return launch(2, "observed_cases")


@pytest.mark.skipif(OLD, reason=f"torch {version('torch')} asks for no backend in C++: 2.14 and later do")
@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(two, case):
    assert_passed(two, case)
