"""When a signal ends a process at once: a second request, and one that comes when the run is over."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HEARS = Path(__file__).parent / "programs" / "hears_requests.py"
PROGRAM = Path(__file__).parent / "programs" / "signalled_at_its_end.py"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=["USR1", "TERM"])
def test_a_request_that_comes_while_the_interpreter_goes_changes_nothing(number):
    def code(*over):
        return subprocess.run([sys.executable, PROGRAM, str(int(number)), *over], timeout=120).returncode

    assert code("over") == number
    assert code() == -number  # or else this test would not notice


def hearing(*words, **environment):
    """A process that hears signals, asked once."""
    process = subprocess.Popen(
        [sys.executable, HEARS, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert process.stdout.readline() == "ready\n"
    return process


def ended(process, seconds=60.0):
    """Its exit code; None if it has not ended after so long."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("words", [[], ["stuck"]], ids=["python", "native"])
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP], ids=["TERM", "HUP"])
def test_a_later_term_ends_a_rank_at_once_whatever_it_is_in(first, words):
    process = hearing("0.3", *words)
    process.send_signal(first)
    assert process.stdout.readline() == "asked\n"
    time.sleep(0.6)  # the time is what is tried
    process.send_signal(signal.SIGTERM)
    assert ended(process) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("again_s", "environment"), [("60", {}), ("0", {"SLURM_JOB_ID": "1"})], ids=["at once", "batch"]
)
def test_a_second_term_changes_nothing_at_once_or_in_a_batch_job(again_s, environment):
    process = hearing(again_s, **environment)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        process.send_signal(number)
    assert process.stdout.readline() == "asked\n"
    while "hears_requests.py" not in process.stderr.readline():
        assert process.poll() is None  # QUIT came last, and has been heard
    assert ended(process, 0.5) is None


def test_hup_that_was_ignored_at_the_start_asks_for_nothing():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` has it
    try:
        process = hearing("60")
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGQUIT)
    while "hears_requests.py" not in process.stderr.readline():
        assert process.poll() is None
    process.kill()
    assert process.stdout.read() == ""
    ended(process)


HUP_WHILE_MPI_STARTS = """
import os, signal
from mpitrain.system.launched import end_requests
heard = []
signal.signal(signal.SIGHUP, lambda *_: heard.append(1))
take_back = end_requests.take_back
end_requests.take_back = lambda: (os.kill(os.getpid(), signal.SIGHUP), take_back())
import mpitrain.mpi.bindings
print(len(heard))
"""


def test_hup_that_comes_while_mpi_starts_is_heard():
    """UCX takes it for its debugger, unless it is told not to."""
    words = [sys.executable, "-c", HUP_WHILE_MPI_STARTS]
    assert subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=120).stdout == "1\n"
