"""Who gets the signals that ask for an end while a rank is being started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.system.launched import rank_status

# What a rank is as soon as its launch, and so whoever sends signals, hears of it.
RANK = """\
import sys
from pathlib import Path
sys.argv, sys.orig_argv = {argv!r}, {orig_argv!r}
import mpitrain
for task in sorted(Path("/proc/self/task").iterdir(), key=lambda task: int(task.name)):
    (mask,) = (line.split()[1] for line in (task / "status").read_text().splitlines() if line.startswith("SigBlk"))
    print(mask)
"""
COMMANDS = {
    "python -m mpitrain": (["-m", "train", "job.py"], ["python", "-m", "mpitrain", "train", "job.py"], True),
    "mpitrain": (["/bin/mpitrain", "train", "job.py"], ["python", "/bin/mpitrain", "train", "job.py"], True),
    "a program": (["loop.py", "train"], ["python", "loop.py", "train"], False),
    "no rank of a run": (["-m", "env"], ["python", "-m", "mpitrain", "env"], False),
}


@pytest.mark.parametrize("of", COMMANDS)
def test_a_rank_that_is_heard_of_holds_back_what_asks_for_an_end(of: str, tmp_path: Path) -> None:
    argv, orig_argv, waits = COMMANDS[of]
    (tmp_path / "launch.json").write_text("{}")
    env = {
        **os.environ,
        "MPITRAIN_LAUNCH_DIR": str(tmp_path),
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "2",
    }
    command = [sys.executable, "-c", RANK.format(argv=argv, orig_argv=orig_argv)]
    main, *others = subprocess.run(
        command, env=env, capture_output=True, text=True, check=True
    ).stdout.split()
    assert list(rank_status.read_all(tmp_path)) == [0]
    ends = {signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP}
    assert {number for number in ends if int(main, 16) >> (number - 1) & 1} == (ends if waits else set())
    assert (
        len(others) == 1
    )  # the thread that reports; a signal to the process must not end it by way of this one
    assert {number for number in ends if int(others[0], 16) >> (number - 1) & 1} == ends
