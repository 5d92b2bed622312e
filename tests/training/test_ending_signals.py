"""Signals that come when a run is over, while its process ends."""

import signal
import subprocess
import sys

import pytest

# C's exit handlers run after the interpreter has gone: this one sends the process the signal that is its exit code.
PROGRAM = """
import ctypes, sys
from mpitrain.training import signals

libc = ctypes.CDLL(None)
libc.on_exit(libc["raise"], None)
signals.install_early()
{over}
sys.exit({number})
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=["USR1", "TERM"])
def test_a_request_that_comes_while_the_interpreter_goes_changes_nothing(number):
    def code(over):
        program = PROGRAM.format(over=over, number=int(number))
        return subprocess.run([sys.executable, "-c", program], timeout=120).returncode

    assert code("signals.ignore()") == number
    assert code("") == -number  # or else this test would not notice
