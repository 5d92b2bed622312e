"""The runtime (`programs/runtime_cases.py`), and the pure functions beside it."""

import pytest

from mpitrain.mpi.runtime import may_miss_from_any
from mpitrain.system.launched.node_map import name_ranks, node_indices
from tests.mpi.cases import assert_passed, case_names, launch, launch_program


@pytest.fixture(scope="module")
def result():
    return launch(3, "runtime_cases")


@pytest.mark.parametrize("case", case_names("runtime_cases"))
def test_runtime(result, case):
    assert_passed(result, case)


def test_launch_ends_cleanly(result):
    result.check()


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([2], "rank 2"),
        ([0, 1, 2, 6], "ranks 0-2, 6"),
        ([1, 3, 4], "ranks 1, 3-4"),
        (list(range(8)), "all ranks"),
    ],
)
def test_ranks_are_named_in_runs(ranks, text):
    assert name_ranks(ranks, 8) == text


def test_nodes_are_numbered_as_the_ranks_meet_them():
    assert node_indices(["b", "a", "b", "c", "a"]) == (0, 1, 0, 2, 1)


def test_nodes_are_told_apart_where_mpiexec_hands_one_slurm_node_name_to_all():
    """Hydra does, inside a Slurm allocation of several nodes."""
    run = launch_program(3, "hosts_of_their_own", env={"SLURMD_NODENAME": "hosta"}, mpi="mpich")
    if run.code == 77:
        pytest.skip("a host name of its own needs root")
    run.check()
    assert run.ranks_out == ("0 1 0 2 0 hosta\n", "0 1 0 2 0 hostb\n", "0 1 0 2 1 hosta\n")


@pytest.mark.parametrize(
    ("library", "nodes", "may_miss"),
    [
        ("MPICH Version:      5.0.2", [0, 0, 1], True),
        ("MPICH Version:      5.0.2", [0, 0, 0], False),
        ("MPICH Version:      5.0.2", [0, 1, 2], True),
        ("Intel(R) MPI Library 2021.13 for Linux* OS", [0, 1, 1], True),
        ("Open MPI v5.0.11, package: Open MPI user@localhost Distribution", [0, 0, 1], False),
    ],
)
def test_one_receive_listens_to_all_peers_unless_they_are_on_several_nodes_of_another_library_than_open_mpi(
    library, nodes, may_miss
):
    assert may_miss_from_any(library, nodes) is may_miss
