"""Samples per second: over the time from the end of the warm-up to the last step, less the pauses within it."""

import itertools
import statistics
from types import SimpleNamespace

import pytest

from mpitrain.training import measure
from mpitrain.training.measure import Meter


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(measure, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


def take_steps(meter, clock, num_steps=4, **at_step):
    for step in range(1, num_steps + 1):
        clock.now_s += 1.0
        meter.progress(10 * step, step, 1, 0.5)
        if step in at_step.get("pauses", ()):
            clock.now_s += 7.0
            meter.pause(7.0)


def make_meter(num_warmup=0):
    return Meter(
        SimpleNamespace(progress=lambda *_, **__: None, begin=lambda *_: None, pause=lambda *_: None),
        num_warmup,
    )


@pytest.mark.parametrize("num_warmup", [0, 1, 2])
@pytest.mark.parametrize("pauses", [(), (1,), (2, 3), (4,), (1, 2, 3, 4)])
def test_pauses_do_not_change_samples_per_second_wherever_they_stand(clock, num_warmup, pauses):
    meter = make_meter(num_warmup)
    take_steps(meter, clock, pauses=pauses)
    assert meter.result()["samples_per_second"] == 10


def test_the_spread_is_that_of_windows_without_pauses_and_warm_up(clock):
    meter = make_meter(num_warmup=1)
    for step, seconds in enumerate((9.0, 1.0, 1.0, 2.0, 2.0), 1):  # rates 10, 10, 5, 5 after the warm-up
        clock.now_s += seconds
        meter.progress(10 * step, step, 1, 0.5)
        clock.now_s += 7.0
        meter.pause(7.0)
    rates = (10, 10, 5, 5)
    assert meter.result()["spread"] == pytest.approx(statistics.stdev(rates) / statistics.mean(rates))


def test_a_long_run_keeps_few_windows_of_equal_steps(clock):
    meter = make_meter()
    for step in range(1, 1001):
        clock.now_s += 1.0 if step <= 512 else 0.5
        meter.progress(10 * step, step, 1, 0.5)
    marks = meter.windows._marks
    steps = {(after[1] - before[1]) // 10 for before, after in itertools.pairwise(marks)}
    assert len(steps) == 1 and 10 <= len(marks) - 1 <= 20
    assert meter.result()["spread"] == pytest.approx(0.34, abs=0.02)  # of rates 10 and 20, one each


def test_one_window_has_no_spread(clock):
    meter = make_meter()
    take_steps(meter, clock, num_steps=1)
    assert meter.result()["spread"] is None and meter.result()["leg_samples"] == 10


def test_waiting_for_the_last_step_of_others_is_training_and_a_pause_before_it_is_none(clock):
    meter = make_meter()
    take_steps(meter, clock, pauses=(4,))
    clock.now_s += 4.0
    meter.until_now()
    assert meter.result()["samples_per_second"] == 40 / 8
