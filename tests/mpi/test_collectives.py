"""The collectives (`programs/collective_cases.py`) on 4 ranks, on 2 over TCP, on 3 under MPICH, and with our own algorithms
on uneven nodes."""

import pytest

from tests.mpi.cases import TCP, assert_passed, case_names, launch

CASES = case_names("collective_cases")
REDUCING = [
    "case_groups_of_both_kinds", "case_reductions_equal_gloo_and_numpy", "case_premultiplied_sums_and_refusals",
    "case_float32_on_a_sixteen_bit_wire", "case_the_choice_is_the_same_everywhere",
]  # fmt: skip


@pytest.fixture(scope="module")
def four():
    return launch(4, "collective_cases", timeout_s=120)


@pytest.fixture(scope="module")
def two_over_tcp():
    return launch(2, "collective_cases", mpirun_args=TCP, timeout_s=120)


@pytest.fixture(scope="module")
def mpich():
    return launch(3, "collective_cases", mpi="mpich", timeout_s=120)


@pytest.mark.parametrize("case", CASES)
def test_on_four_ranks(four, case):
    assert_passed(four, case)


@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks_over_tcp(two_over_tcp, case):
    assert_passed(two_over_tcp, case)


@pytest.mark.parametrize("case", CASES)
def test_under_mpich(mpich, case):
    assert_passed(mpich, case)


def test_launches_end_cleanly(four, two_over_tcp):
    for result in (four, two_over_tcp):
        result.check()
