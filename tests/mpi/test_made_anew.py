"""Groups that survivors of a death make anew (`programs/made_anew.py`); over torch's own names, `torch_suite/`."""

import pytest

from tests.mpi.cases import launch_program
from tests.mpi.test_observed import OLD, version
from tests.ranks import run_ranks
from tests.torch_suite import fault_tolerance as suite

LEFT = {  # after each step
    "tries_that_are_refused": 5, "a_member_dies_while_the_group_is_made": 4, "a_member_dies_in_a_collective": 3,
    "one_rank_aborts": 3,
}  # fmt: skip
WITHOUT_ULFM = """
from datetime import timedelta
from mpitrain.errors import UsageError
from mpitrain.mpi import runtime
from mpitrain.mpi.process_group import reconfigurable
rt = runtime.start()
try:
    reconfigurable.make(rt, [0, 1], timedelta(seconds=9))
except UsageError as error:
    assert "--with-ft ulfm" in str(error), error
    print("refused")
"""
needs_torch = pytest.mark.skipif(
    OLD, reason=f"torch {version('torch')} makes no group anew: 2.14 and later do"
)


@pytest.fixture(scope="module")
def five():
    return launch_program(5, "made_anew", mpirun_args=("--with-ft", "ulfm"), timeout_s=240)


@pytest.mark.parametrize("step", LEFT)
def test_survivors_make_their_group_anew(five, step):
    assert all(f"ok {step}\n" in out for out in five.ranks_out[: LEFT[step]]), five


def test_where_no_death_is_reported_it_is_refused():
    result = run_ranks(2, WITHOUT_ULFM).check()
    assert result.stdout.count("refused") == 2, result


@needs_torch
def test_torchs_questions():
    outcomes = suite.ask(suite.OURS, suite.all_tests())
    assert len(outcomes) == 13 and {outcome for outcome, _ in outcomes.values()} == {suite.PASS}, outcomes


@needs_torch
def test_survivors_of_a_kill_go_on_and_make_groups_of_their_own():
    outcome = suite.kill(suite.OURS, victim=0, after_s=0.1, sizes="16,262144")
    assert outcome.went_on, outcome


@needs_torch
@pytest.mark.extended
@pytest.mark.parametrize("backend", [suite.GLOO, suite.OURS])
def test_survivors_of_many_kills_go_on(backend):
    assert all(outcome.went_on for outcome in suite.kills(backend, 4, seed=1))
