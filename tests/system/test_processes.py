"""Nobody is signalled, or held for dead, by a number that means somebody else."""

import os
import signal
import subprocess
import sys

import pytest

from mpitrain.system.processes import identity, is_gone, is_visible, runs, send_signal


@pytest.fixture
def sleeper():
    child = subprocess.Popen(
        [sys.executable, "-c", "print('up', flush=True); import time; time.sleep(600)"], stdout=-1
    )
    child.stdout.readline()
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def parts(process, **changed):
    names = ("boot", "namespace", "pid", "start")
    return ":".join({**dict(zip(names, process.split(":"))), **changed}.values())


def test_who_has_our_number_elsewhere_or_after_us_is_somebody_else(sleeper):
    victim = identity(sleeper.pid)
    elsewhere = [parts(victim, namespace="1"), parts(victim, boot="another-machine"), ""]
    for other in elsewhere:
        assert not is_visible(other) and not is_gone(other) and not runs(other), "nothing is known of it"
    before = parts(victim, start="1")  # died, and its number was used again
    assert is_visible(before) and is_gone(before) and not runs(before)
    for other in (*elsewhere, before):
        assert not send_signal(other, signal.SIGKILL)
    assert sleeper.poll() is None and runs(victim)


def test_the_very_process_is_signalled(sleeper):
    victim = identity(sleeper.pid)
    assert send_signal(victim, signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    assert not runs(victim) and not is_gone(victim)
    assert send_signal(victim, signal.SIGKILL)
    assert sleeper.wait() == -signal.SIGKILL
    assert is_gone(victim) and not send_signal(victim, signal.SIGKILL)
    assert identity(sleeper.pid) == ""
