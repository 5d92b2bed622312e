"""Signals that come when a run is over, while its process ends."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "signalled_at_its_end.py"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=["USR1", "TERM"])
def test_a_request_that_comes_while_the_interpreter_goes_changes_nothing(number):
    def code(*over):
        return subprocess.run([sys.executable, PROGRAM, str(int(number)), *over], timeout=120).returncode

    assert code("over") == number
    assert code() == -number  # or else this test would not notice
