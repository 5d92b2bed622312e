"""What the ends of a job cost, against closed forms."""

import math

import pytest

from mpitrain.errors import UsageError
from mpitrain.virtual.outages import Outages


def test_an_end_costs_the_work_since_the_last_checkpoint_and_a_start():
    outages = Outages(restart_s=5.0, at_s=(37.0,))
    for taken_s in (10.0, 20.0, 30.0):
        outages.keep(taken_s, taken_s + 8.0)  # the third is whole at 38
    assert outages.elapsed_s(36.0) == 36.0
    assert outages.elapsed_s(100.0) == 100.0 + 5.0 + (37.0 - 20.0)
    assert (outages.num_ends, outages.starting_s, outages.repeated_s) == (1, 5.0, 17.0)


def test_without_a_checkpoint_the_job_begins_anew():
    assert Outages(2.0, at_s=(30.0,)).elapsed_s(40.0) == 40.0 + 2.0 + 30.0


def test_an_end_while_it_starts_or_repeats_has_it_start_again():
    """It ends at 30, while it starts at 34, and 15 s into the 20 s that it repeats from 39 on."""
    outages = Outages(5.0, at_s=(30.0, 34.0, 54.0))
    outages.keep(10.0, 12.0)
    assert outages.elapsed_s(40.0) == 40.0 + (34.0 - 30.0) + 5.0 + 15.0 + 5.0 + 20.0
    assert (outages.num_ends, outages.starting_s, outages.repeated_s) == (3, 14.0, 35.0)


def test_what_is_whole_when_the_work_is_repeated_was_whole_before():
    """The checkpoint of 20 is whole at 31: a job that ended at 30 ends again where it had got to 29."""
    outages = Outages(0.0, at_s=(30.0, 30.0 + 19.0))
    outages.keep(10.0, 12.0)
    outages.keep(20.0, 31.0)
    assert outages.elapsed_s(40.0) == 40.0 + 19.0 + 20.0


@pytest.mark.parametrize(
    "mtbf_s, every_s, restart_s", [(100.0, 20.0, 0.0), (50.0, 30.0, 10.0), (300.0, 5.0, 60.0)]
)
def test_the_mean_is_that_of_daly(mtbf_s, every_s, restart_s):
    """M exp(R / M) (exp(tau / M) - 1) seconds for each interval tau between two checkpoints that cost nothing, at
    exponential times between failures of mean M and a restart of R, in which it can fail, too (Daly, Future Generation
    Computer Systems 22, 2006, equation 13)."""
    intervals, rounds = 20, 400
    took_s = []
    for seed in range(rounds):
        outages = Outages(restart_s, mtbf_s, seed=seed)
        for number in range(1, intervals):
            outages.elapsed_s(number * every_s)
            outages.keep(number * every_s, number * every_s)
        took_s.append(outages.elapsed_s(intervals * every_s))
    mean = sum(took_s) / rounds
    error = math.sqrt(sum((one - mean) ** 2 for one in took_s) / (rounds - 1) / rounds)
    expected = intervals * mtbf_s * math.exp(restart_s / mtbf_s) * (math.exp(every_s / mtbf_s) - 1.0)
    assert abs(mean - expected) < 4 * error < 0.1 * expected


def test_a_job_that_gets_no_further_is_an_error_that_says_what_to_do():
    outages = Outages(restart_s=1.0, mtbf_s=1.0)
    with pytest.raises(UsageError, match=r"10000 times in a row .*--checkpoint-every"):
        outages.elapsed_s(50.0)


def test_a_death_comes_after_what_ended_the_job_before_it_and_a_second_one_with_it_changes_nothing():
    """A crash at 3 costs 3 + 5, and the death at 6 of useful time another 6 + 5."""
    outages = Outages(5.0, at_s=(3.0,))
    outages.die(6.0)
    outages.die(6.0)
    assert outages.num_ends == 2 and outages.elapsed_s(10.0) == 10.0 + (3.0 + 5.0) + (6.0 + 5.0)


def test_a_death_that_is_told_late_counts_where_time_has_got_to():
    outages = Outages(1.0)
    outages.keep(4.0, 4.0)
    outages.keep(8.0, 8.0)
    assert outages.elapsed_s(9.0) == 9.0
    outages.die(7.5)
    assert outages.elapsed_s(9.0) == 9.0 + 1.0 + 1.0


@pytest.mark.parametrize("restart_s, mtbf_s, at_s", [(1.7e308, math.inf, (1e308,)), (60.0, 0.01, ())])
def test_a_job_that_never_gets_started_is_an_error_at_once(restart_s, mtbf_s, at_s):
    with pytest.raises(UsageError, match="10000 times in a row|seldom lives"):
        Outages(restart_s, mtbf_s, at_s).elapsed_s(1.5e308 if at_s else 50.0)
