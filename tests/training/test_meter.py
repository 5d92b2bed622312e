"""Samples per second: over the time from the end of the warm-up to the last step, less the pauses within it."""

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
    return Meter(SimpleNamespace(progress=lambda *_, **__: None), num_warmup)


@pytest.mark.parametrize("num_warmup", [0, 1, 2])
@pytest.mark.parametrize("pauses", [(), (1,), (2, 3), (4,), (1, 2, 3, 4)])
def test_pauses_do_not_change_samples_per_second_wherever_they_stand(clock, num_warmup, pauses):
    meter = make_meter(num_warmup)
    take_steps(meter, clock, pauses=pauses)
    assert meter.result()["samples_per_second"] == 10


def test_waiting_for_the_last_step_of_others_is_training_and_a_pause_before_it_is_none(clock):
    meter = make_meter()
    take_steps(meter, clock, pauses=(4,))
    clock.now_s += 4.0
    meter.until_now()
    assert meter.result()["samples_per_second"] == 40 / 8
