"""The guarded buffer function (`programs/buffer_cases.py`): every dtype and layout, and staging with a stand-in GPU."""

import pytest

from tests.mpi.cases import assert_passed, case_names, launch


@pytest.fixture(scope="module")
def result():
    return launch(2, "buffer_cases")


@pytest.mark.parametrize("case", case_names("buffer_cases"))
def test_buffers(result, case):
    assert_passed(result, case)


def test_launch_ends_cleanly(result):
    result.check()
