"""When a rank counts as stuck, whom its alarm reaches, and that nothing torn is written."""

import os
import time
from types import SimpleNamespace

import pytest
import torch

from mpitrain.checkpoint import CheckpointWriter, PartPlan, newest, read_part
from mpitrain.errors import CheckpointError
from mpitrain.reporting.rows import METRICS_FILE
from mpitrain.strategies.checkpoint_policy import read_policy
from mpitrain.system.files.run_directory import Identity
from mpitrain.training.watchdog.alarm_files import Alarm
from mpitrain.training.watchdog.emergency import Emergency, Guard, KeptBuffers, Taken
from mpitrain.training.watchdog.liveness import LivenessCheck
from mpitrain.training.watchdog.watchdog import PATIENCE, Watchdog


@pytest.mark.parametrize(
    ("idle", "waits", "quiet", "stuck"),
    [
        (1.1, False, 0, True),  # neither works nor waits
        (1.1, True, 99, False),  # waits for somebody who may be at a long validation
        (PATIENCE * 1.1, True, 0.5, False),  # waits, and the run moves
        (PATIENCE * 1.1, True, 1.5, True),  # everybody waits for everybody
        (PATIENCE * 1.1, True, None, True),  # nothing has ever been told
        (0.9, False, 99, False),
    ],
)
def test_who_is_stuck(tmp_path, idle, waits, quiet, stuck):
    """Times in the watchdog's own; how long the run is quiet it knows by its own clock, not by the file server's."""
    timeout_s = 1000.0
    metrics = tmp_path / METRICS_FILE
    if quiet is not None:
        metrics.touch()
        os.utime(metrics, (1, 1))
    runtime = SimpleNamespace(
        rank=0, idle_s=lambda: idle * timeout_s, stuck_s=lambda: 0.0 if waits else idle * timeout_s
    )
    session = SimpleNamespace(run_dir=tmp_path)
    watchdog = Watchdog(runtime, session, timeout_s)
    assert watchdog._is_stuck() is (stuck and not waits)  # of the file it has seen nothing yet
    looked_s = time.monotonic() - (1.5 if quiet is None else quiet) * timeout_s
    watchdog._metrics_seen = watchdog._metrics_seen and (watchdog._metrics_seen[0], looked_s)
    assert watchdog._is_stuck() is stuck
    if stuck and waits and quiet is not None:
        os.utime(metrics, (2, 2))  # the run gets on
        assert not watchdog._is_stuck()


@pytest.mark.parametrize(
    ("level", "rank", "may_die_alone", "survives_shrink", "alone"),
    [
        ("none", 1, True, False, False),
        ("ulfm", 0, True, False, True),
        ("ulfm", 0, False, True, True),
        ("ulfm", 1, False, False, False),
        ("heartbeat", 1, True, False, True),
        ("heartbeat", 0, True, False, False),  # which writes the result
    ],
)
def test_who_raises_no_alarm(tmp_path, level, rank, may_die_alone, survives_shrink, alone):
    runtime = SimpleNamespace(
        fault_tolerance=level, rank=rank, may_die_alone=may_die_alone, survives_shrink=survives_shrink
    )
    watchdog = Watchdog(runtime, SimpleNamespace(run_dir=tmp_path), 1.0)
    assert watchdog._dies_alone() is alone


def writer(tmp_path, part, guard, taken, **options):
    return Emergency(
        CheckpointWriter(PartPlan(tmp_path, part, Identity("run", "attempt"), read_policy("never", None))),
        guard,
        lambda: taken,
        **options,
    )


def test_what_may_be_torn_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("mpitrain.training.watchdog.emergency.HOLD_S", 0.01)
    alarm, guard = Alarm(tmp_path, 0, 5), Guard()
    alarm.raise_alarm()
    one = writer(tmp_path, "shard-0", guard, Taken(96, 3, {"w": torch.ones(2)}), parts=lambda: ["shard-0"])
    with pytest.raises(CheckpointError, match="no step has been taken"):
        one.write(alarm)
    guard.end()
    assert guard.begin()
    with pytest.raises(CheckpointError, match="in the middle of an update"):
        one.write(alarm)
    assert newest(tmp_path) is None and alarm.announced(0.0) is None
    with guard.changing():
        pass  # a change within a change leaves it as it was
    with pytest.raises(CheckpointError, match="in the middle of an update"):
        one.write(alarm)
    guard.end()
    one.write(alarm)
    found = newest(tmp_path)
    assert found.checkpoint_at == 96 and torch.equal(read_part(found.folder, "shard-0")["w"], torch.ones(2))


def test_parts_of_different_steps_make_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("mpitrain.training.watchdog.emergency.HOLD_S", 0.01)
    monkeypatch.setattr("mpitrain.training.watchdog.emergency.OTHERS_S", 0.0)
    guard, alarm = Guard(), Alarm(tmp_path, 0, 5)
    alarm.raise_alarm()
    guard.end()
    parts = ["shard-0", "shard-1"]
    writer(tmp_path, "shard-0", guard, Taken(96, 3, {}), parts=lambda: parts).write(alarm)
    with pytest.raises(CheckpointError, match="it is at 104 samples, step 4, and the first part is of 96"):
        writer(tmp_path, "shard-1", guard, Taken(104, 4, {})).write(alarm)
    writer(tmp_path, "shard-2", guard, Taken(104, 4, {})).write(alarm)  # belongs to no checkpoint
    assert newest(tmp_path) is None
    writer(tmp_path, "shard-1", guard, Taken(96, 3, {})).write(alarm)
    assert newest(tmp_path).parts == ("shard-0", "shard-1")


def test_an_alarm_is_heard_by_this_start_alone(tmp_path):
    ringing, hearing, next_start = (
        Alarm(tmp_path, 1, 5),
        Alarm(tmp_path, 0, 5),
        Alarm(tmp_path, 0, 6),
    )
    assert hearing.raised_by() == []
    ringing.raise_alarm()
    assert hearing.raised_by() == [1] and next_start.raised_by() == []
    hearing.begin()
    hearing.end("why not")
    assert ringing.wait({0, 1}, 0.0, 60.0) == {0: "why not"}
    assert ringing.wait({0}, 60.0, 60.0) == {0: "why not"}  # nobody else is left: at once


def test_buffers_are_those_of_before_the_forward_pass():
    module = torch.nn.BatchNorm1d(2)
    kept = KeptBuffers(module)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module(torch.randn(8, 2))
    state = module.state_dict()
    assert not torch.equal(state["running_mean"], before["running_mean"])
    kept.put_into(state)
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())


def test_on_a_full_disk_nobody_is_taken_for_silent(tmp_path, monkeypatch):
    """Whoever cannot answer its own call cannot expect answers; nor does the thread that calls die of it."""
    check = LivenessCheck(tmp_path, 0, 1)
    assert check.ask({0, 1}, 0.0) == {1}
    monkeypatch.setattr(LivenessCheck, "answer", lambda self: None)
    assert check.ask({0, 1}, 60.0) == set()
    (tmp_path / "file").touch()
    assert LivenessCheck(tmp_path / "file", 0, 1).ask({0, 1}, 60.0) == set()


@pytest.mark.parametrize(("timeout_s", "patience_s"), [(6.0, 11.5), (60.0, 12.0), (900.0, 72.0)])
def test_a_long_watchdog_waits_for_a_file_system_that_shows_names_late(tmp_path, timeout_s, patience_s):
    assert Watchdog(None, SimpleNamespace(run_dir=tmp_path), timeout_s).patience_s == patience_s
