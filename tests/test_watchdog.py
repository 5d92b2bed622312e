"""When a rank counts as stuck: arithmetic on what the runtime says, and on the age of the metrics file."""

import os
import time
from types import SimpleNamespace

import pytest

from mpitrain.report import METRICS_FILE
from mpitrain.training.watchdog import PATIENCE, Watchdog


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
    """Times in the watchdog's own."""
    timeout_s = 1000.0
    if quiet is not None:
        metrics = tmp_path / METRICS_FILE
        metrics.touch()
        told_s = time.time() - quiet * timeout_s
        os.utime(metrics, (told_s, told_s))
    runtime = SimpleNamespace(
        rank=0, idle_s=lambda: idle * timeout_s, stuck_s=lambda: 0.0 if waits else idle * timeout_s
    )
    assert Watchdog(runtime, tmp_path, timeout_s)._is_stuck() is stuck
