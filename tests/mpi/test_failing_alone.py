"""`mt.train` on a single rank raises what went wrong, so that notebooks and tests go on."""

import os
import subprocess
import sys

from tests.mpi.cases import PROGRAMS
from tests.ranks import ROOT


def test_runs_that_fail_raise_and_the_process_trains_again(tmp_path):
    program = [sys.executable, str(PROGRAMS / "failing_alone.py"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, cwd=ROOT, env=environment)
    assert "goes on" in done.stdout, done.stderr
    assert done.returncode == 1 and "of the script's own" in done.stderr
