"""Periodic averaging over real ranks (`programs/averaging_cases.py`)."""

import pytest

from tests.mpi.cases import assert_passed, case_names, launch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    env = {"AVERAGING_OUT": str(tmp_path_factory.mktemp("averaging"))}
    return launch(4, "averaging_cases", env=env)


@pytest.mark.parametrize("case", case_names("averaging_cases"))
def test_case(ranks, case):
    assert_passed(ranks, case)
