"""What a torch scheduler counts, against a loop that takes the steps one by one."""

import pytest

from mpitrain.strategies.ticks import Law, Ticks


def counted(epoch_samples, legs, epochs):
    """{accepted samples: steps so far} of a run with these legs: (batch size, workers, least, samples at its end)."""
    found, samples, steps, epoch, done = {0: 0}, 0, 0, 0, 0
    legs = list(legs)
    while epoch < epochs:
        size, workers, least, until = legs[0]
        if until is not None and samples >= until:
            legs.pop(0)
            continue
        count = min(size * workers, epoch_samples - done)
        if count == size * workers or count >= max(1, least):
            samples, steps, done = samples + count, steps + 1, done + count
            found[samples] = steps
        if epoch_samples - done < max(1, least):
            epoch, done = epoch + 1, 0
    return found, steps


LEGS = {
    "fewer": [(8, 3, 3, 72), (8, 1, 1, None)],
    "more": [(8, 1, 1, 40), (8, 3, 3, None)],
    "in the second epoch": [(4, 3, 3, 112), (4, 2, 2, 128), (4, 5, 5, None)],
    "other batches at an epoch's end": [(4, 3, 3, 100), (7, 3, 3, None)],
    "drop_last": [(8, 3, 24, 48), (8, 2, 16, None)],
}


@pytest.mark.parametrize("legs", LEGS.values(), ids=LEGS)
def test_the_count_so_far_stays_and_a_tick_is_a_step_of_those_that_are_there(legs):
    expected, num_steps = counted(100, legs, 3)
    states = [None]
    for number, (size, workers, least, until) in enumerate(legs):
        ticks = Ticks(100, Law(size, workers, least))
        if states[-1] is not None:
            ticks.restore(states[-1])
        until = max(expected) if until is None else until
        low = legs[number - 1][3] if number else 0
        assert {at: ticks.at(at) for at in expected if low <= at <= until} == {
            at: count for at, count in expected.items() if low <= at <= until
        }
        states.append(ticks.state(until))
    assert ticks.at_end(3) == num_steps


def test_who_goes_on_alike_counts_as_if_nothing_had_been_stopped():
    """In the middle of a step as well: the samples that a tick still lacks are not forgotten."""
    whole = Ticks(50, Law(4, 3))
    whole.change(Law(4, 2), 17)
    for at in range(17, 120):
        again = Ticks(50, Law(4, 2))
        again.restore(whole.state(at))
        assert [again.at(after) for after in range(at, 200)] == [whole.at(after) for after in range(at, 200)]


def test_a_law_among_fewer_keeps_what_becomes_of_a_rest():
    assert Law(4, 3, 12).among(2) == Law(4, 2, 8)
    assert Law(4, 3, 3).among(2) == Law(4, 2, 2)
    assert Law(4, 3, 1).among(2) == Law(4, 2, 1)
