"""The collectives (`programs/collective_cases.py`): 4 ranks, 3 over TCP, 2 under MPICH, ours on uneven nodes.

MPICH's ranks spin while they wait: with more of them than cores the same cases take four times as long.
"""

import pytest

from tests.mpi.cases import TCP, assert_passed, case_names, launch, launch_program
from tests.ranks import run_ranks
from tests.sampling import asked_for, sampled

CASES = case_names("collective_cases")
REDUCING = [
    "case_groups_of_both_kinds", "case_reductions_equal_gloo_and_numpy", "case_premultiplied_sums_and_refusals",
    "case_float32_on_a_sixteen_bit_wire", "case_the_choice_is_the_same_everywhere",
]  # fmt: skip


@pytest.fixture(scope="module")
def four():
    return launch(4, "collective_cases")


@pytest.fixture(scope="module")
def three_over_tcp():
    return launch(3, "collective_cases", mpirun_args=TCP)


@pytest.fixture(scope="module")
def mpich(request):
    return launch(
        2, "collective_cases", sorted(asked_for(request, "of_mpich") - {None}, key=CASES.index), mpi="mpich"
    )


@pytest.mark.parametrize("case", CASES)
def test_on_four_ranks(four, case):
    assert_passed(four, case)


@pytest.mark.extended
@pytest.mark.parametrize("case", CASES)
def test_on_three_ranks_over_tcp(three_over_tcp, case):
    assert_passed(three_over_tcp, case)


@pytest.mark.parametrize("of_mpich", sampled(CASES, ()))  # `make test-mpich` runs all
def test_under_mpich(mpich, of_mpich):
    assert_passed(mpich, of_mpich)


@pytest.fixture(scope="module")
def uneven_nodes():
    nodes = {"MPITRAIN_TEST_NODES": "2,1", "MPITRAIN_ALLREDUCE": "hierarchical"}
    return launch(3, "collective_cases", REDUCING, env=nodes)


@pytest.mark.parametrize("case", REDUCING)
def test_with_our_own_algorithms_on_nodes_of_two_and_one(uneven_nodes, case):
    assert_passed(uneven_nodes, case)


def test_launches_end_cleanly(four, uneven_nodes):
    for result in (four, uneven_nodes):
        result.check()


@pytest.mark.extended
def test_a_launch_over_tcp_ends_cleanly(three_over_tcp):
    three_over_tcp.check()


# ---- torch's own training on top

TRAINING = case_names("torch_cases")


@pytest.fixture(scope="module")
def training():
    return launch(2, "torch_cases")


@pytest.mark.parametrize("case", TRAINING)
def test_torch_on_top_equals_one_process(training, case):
    assert_passed(training, case)


# ---- what goes wrong is said on every rank


def test_a_rank_that_leaves_is_named_on_all_others():
    result = launch_program(3, "leaves_the_group")
    for rank in (0, 2):
        assert "rank 1: no collective: it has left the group" in result.ranks_out[rank], result


def test_the_groups_timeout_ends_ddps_own_wait_too():
    result = launch_program(2, "late_for_a_collective")
    assert result.ranks_out[0].count("told: timeout") == 2, result
    assert "given up" in result.ranks_out[1], result


def test_ranks_that_torchrun_numbered_are_refused_by_name():
    env = {"RANK": "0", "WORLD_SIZE": "3"}
    result = run_ranks(
        2, "import torch.distributed as dist, mpitrain\ndist.init_process_group('mpi4py')\n", env=env
    )
    assert result.code == 2 and "WORLD_SIZE=3" in result.stderr and "mpirun" in result.stderr, result
