"""When ranks that take the same steps write a checkpoint, and when they ask one another whether to."""

from __future__ import annotations

import pytest

from mpitrain.strategies.checkpoint_policy import MOST_STEPS, Cadence, read_policy


def test_samples_are_counted_from_where_the_run_goes_on():
    cadence = Cadence(read_policy("100"), 250)
    assert not cadence.is_due(299) and cadence.is_due(300) and cadence.is_due(340)
    cadence.go_on_from(340)
    assert not cadence.is_due(399) and cadence.is_due(400)


@pytest.mark.parametrize("text", ["60s", "auto", "never"])
def test_where_time_is_counted_no_number_of_samples_is_due(text):
    cadence = Cadence(read_policy(text))
    assert cadence.checkpoint_at == 0 and not cadence.is_due(10**9)


@pytest.mark.parametrize(
    ("step_s", "steps"), [(0.09, 5), (0.2, 2), (0.4, 1), (40.0, 1), (0.0, MOST_STEPS), (1e-5, MOST_STEPS)]
)
def test_ranks_ask_one_another_about_twice_a_second(step_s, steps):
    cadence = Cadence(read_policy("auto"))
    assert cadence.ask_at == 0  # after the first step, whatever its number is
    assert cadence.steps_to_next_question(7, 3.0, 3.0 + step_s) == steps
    assert cadence.steps_to_next_question(27, 5.0, 5.0 + 20 * step_s) == steps
