"""Laws of policies and rules, each on plain numbers: when to validate, when to write, what a leave means."""

import math

import pytest

from mpitrain.errors import UsageError
from mpitrain.strategies import Async, SoftSync
from mpitrain.strategies.base import NOTHING, Verdict
from mpitrain.strategies.checkpoint_policy import Cadence, CheckpointPolicy, read_policy
from mpitrain.strategies.parameter_server.staleness import ShardCounts
from mpitrain.strategies.sampling.epoch_steps import EpochSteps, Layout
from mpitrain.strategies.schedules import ByFunction
from mpitrain.strategies.validation_policy import (
    EVERY_EPOCH,
    ValidationCadence,
    ValidationPolicy,
    read_validation_policy,
)


@pytest.mark.parametrize(
    "when, policy",
    [
        (None, EVERY_EPOCH), (1, ValidationPolicy(epochs=1)), (2, ValidationPolicy(epochs=2)),
        ("2", ValidationPolicy(epochs=2)),
        ("1 epoch", ValidationPolicy(epochs=1)), (" 3epochs ", ValidationPolicy(epochs=3)),
        ("1 sample", ValidationPolicy(samples=1)), ("10000 samples", ValidationPolicy(samples=10000)),
        ("60s", ValidationPolicy(seconds=60.0)), ("0.5 s", ValidationPolicy(seconds=0.5)),
        ("never", ValidationPolicy()),
    ],
)  # fmt: skip
def test_each_way_to_say_when_to_validate(when, policy):
    assert read_validation_policy(when) == policy


@pytest.mark.parametrize(
    "when", [0, -1, True, False, 1.5, "", "0 epochs", "0 samples", "0s", "0.0 s", "-2", "2.5", "soon", [3]]
)
def test_what_says_no_time_to_validate_is_refused(when):
    with pytest.raises(UsageError, match="validate_every="):
        read_validation_policy(when)


def test_seconds_count_from_the_last_validation_and_only_where_they_were_named():
    now_s = [10.0]
    cadence = ValidationCadence(ValidationPolicy(seconds=0.5), clock=lambda: now_s[0])
    assert cadence.counts_seconds and not cadence.is_due(0, 0)
    for samples, now_s[0], due in ((5, 10.4, False), (6, 10.5, True), (7, 10.9, False), (8, 11.0, True)):
        assert cadence.is_due(0, samples) == due
    for now_s[0], due in ((11.4, False), (11.5, True)):
        assert cadence.time_is_up() == due
    for policy in (EVERY_EPOCH, ValidationPolicy(samples=3), ValidationPolicy()):
        other = ValidationCadence(policy)
        assert not other.counts_seconds and not other.is_due(0, 0)
        assert not other.time_is_up()


def test_epochs_and_samples_are_crossed_not_met():
    cadence = ValidationCadence(ValidationPolicy(samples=10))
    assert [cadence.is_due(0, samples) for samples in (4, 9, 10, 19, 35, 36, 40)] == [
        False, False, True, False, True, False, True,
    ]  # fmt: skip
    cadence = ValidationCadence(ValidationPolicy(epochs=2))
    assert [cadence.is_due(epochs, 0) for epochs in (1, 1, 2, 1, 3, 4, 4, 8)] == [
        False, False, True, False, False, True, False, True,
    ]  # fmt: skip
    cadence.repeat()
    assert cadence.is_due(8, 0) and not cadence.is_due(8, 0)
    asked = []
    together = ValidationCadence(ValidationPolicy(seconds=1.0))
    together.agreed = lambda: asked.append(1) or len(asked) > 1
    assert [together.is_due(0, 0) for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    "text, policy",
    [
        ("", CheckpointPolicy()), ("never", CheckpointPolicy()), ("auto", CheckpointPolicy(auto=True)),
        ("1", CheckpointPolicy(samples=1)), ("5000 samples", CheckpointPolicy(samples=5000)),
        (" 7samples", CheckpointPolicy(samples=7)), ("60s", CheckpointPolicy(seconds=60.0)),
        ("0.5 s", CheckpointPolicy(seconds=0.5)),
    ],
)  # fmt: skip
def test_each_way_to_say_when_to_write(text, policy):
    assert read_policy(text) == policy
    assert policy.is_never == (text in ("", "never"))


@pytest.mark.parametrize("text", ["0", "0 samples", "0s", "-1", "5 epochs", "1.5"])
def test_what_says_no_time_to_write_is_refused(text):
    with pytest.raises(UsageError, match="checkpoint_every="):
        read_policy(text)


def test_the_interval_is_youngs_and_samples_go_by_multiples():
    assert read_policy("auto", 8 * 3600.0).interval_s(100.0) == pytest.approx(math.sqrt(2 * 100 * 8 * 3600))
    assert read_policy("10").interval_s(1.0) == math.inf and read_policy("3 s").interval_s(1.0) == 3.0
    policy = read_policy("10")
    assert [policy.next_checkpoint_at(samples) for samples in (0, 9, 10, 11)] == [10, 10, 20, 20]
    assert read_policy("3 s").next_checkpoint_at(5) == 0
    cadence = Cadence(policy, 10)
    assert cadence.ask_at == 0 and [cadence.is_due(samples) for samples in (10, 19, 20, 21)] == [
        False,
        False,
        True,
        True,
    ]
    cadence.go_on_from(20)
    assert not cadence.is_due(29) and cadence.is_due(30)
    assert not Cadence(read_policy("3 s")).is_due(1 << 40)
    for mtbf_s in (0.0, -1.0, math.inf):
        with pytest.raises(UsageError, match="mtbf_s must be"):
            read_policy("auto", mtbf_s)


def test_a_worker_that_leaves_adds_nothing_to_the_update_that_it_sets_free():
    rule = SoftSync(updates=3, blocking=True)
    memory = {"gathered": 1}
    assert rule.on_leave(memory, 2, {0, 1}, {0, 1, 3}) == NOTHING and memory == {"gathered": 1}
    assert rule.on_leave(memory, 2, {1, 0}, {0, 1}) == Verdict(0.0, True, (0, 1)) and memory == {
        "gathered": 0
    }
    assert rule.on_leave(memory, 2, {1, 0}, {0, 1}) == NOTHING
    assert Async().on_leave({}, 0, {1}, {1}) == NOTHING == Verdict(0.0, False, ())


def test_a_version_is_skipped_that_lies_between_two_reads_of_a_worker():
    counts = ShardCounts()
    assert (counts.accepted, counts.dropped, counts.nonfinite, counts.late, counts.repeated) == (0,) * 5
    assert (counts.samples_accepted, counts.samples_dropped, counts.pushed_bytes, counts.replied_bytes) == (
        0,
    ) * 4
    for version, skipped in ((5, 0), (5, 0), (6, 0), (8, 1), (13, 5)):
        counts.version = version
        counts.read(3, 10)
        assert counts.versions_skipped == skipped
    counts.read(4, 7, uses=2)
    assert counts.versions_skipped == 5 and counts.reads == {3: [5, 5, 6, 8, 13], 4: [13, 13]}
    assert counts.replied_bytes == 57 and counts.oldest_read(3) == 5


@pytest.mark.parametrize("num_samples, has_step", [(7, True), (8, False), (9, False)])
def test_less_than_a_round_is_left_out_where_an_epoch_has_a_whole_one(num_samples, has_step):
    """Two workers of batches of four, gone on in the middle of an epoch."""
    steps = EpochSteps(num_samples, 4, 2, 100, True, Layout({}, num_samples - 4), [0, 1])
    assert (steps.step(0, 0) is not None) == has_step
    assert (
        EpochSteps(num_samples, 4, 2, 100, False, Layout({}, num_samples - 4), [0, 1]).step(0, 0) is not None
    )


def test_a_schedule_by_a_function_is_that_function():
    def halved(epochs, workers):
        return workers * 0.5**epochs

    schedule = ByFunction(halved)
    assert schedule.factor(2.0, 3) == 0.75 and schedule.factor(0.0, 1) == 1.0
    assert str(schedule) == repr(schedule) == "halved" and str(ByFunction(print)) == "print"
