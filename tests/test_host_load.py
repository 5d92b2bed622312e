"""How busy others keep a host is known to the share, whoever asks."""

import subprocess
import sys
import time

import pytest

from mpitrain.system import host_load
from mpitrain.system.host_load import OTHERS, STOLEN, HostLoad, Watch

TICK_S = 0.01


@pytest.mark.parametrize(
    ("user", "idle", "steal", "own_s", "others_share"),
    [
        (50, 50, 0, 0.0, 0.5),
        (50, 50, 0, 50 * TICK_S, 0.0),
        (75, 0, 25, 25 * TICK_S, 0.5),
        (0, 0, 0, 0.0, 0.0),
    ],
)
def test_time_that_was_not_ours_nor_stolen_is_others(monkeypatch, user, idle, steal, own_s, others_share):
    ticks, own = iter([[0] * 8, [user, 0, 0, idle, 0, 0, 0, steal]]), iter([0.0, own_s])
    monkeypatch.setattr(host_load, "ticks", lambda: next(ticks))
    monkeypatch.setattr(host_load, "_own_s", lambda: next(own))
    monkeypatch.setattr(host_load.os, "sysconf", lambda name: round(1 / TICK_S))
    found = Watch().load()
    assert found.others_share == pytest.approx(others_share)
    assert found.steal_share == pytest.approx(steal / max(1, user + idle + steal))
    assert found.is_loaded == (found.others_share >= OTHERS or found.steal_share >= STOLEN)


def test_a_busy_process_is_seen_as_others_and_a_computing_one_is_not():
    watch = Watch()
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        until_s = time.monotonic() + 0.5
        while time.monotonic() < until_s:
            time.sleep(0.05)
        assert watch.load().others_share > 0.0
    finally:
        busy.kill()
        busy.wait()
    assert "loaded" in HostLoad(OTHERS).told() and "quiet" in HostLoad().told()
