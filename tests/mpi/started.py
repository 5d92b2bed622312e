"""Launches that tests send signals to, and whose ranks stand still at a known place (`signalled.py`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mpitrain.checkpoint.parts import newest
from tests.ranks import OWN, ROOT, find_mpi, living, warm_environment

JOB = ROOT / "tests" / "mpi" / "signalled.py"
DEADLINE_S = 240.0


class Started:
    """Ranks of the job on their way to `phase`, in a session of their own.

    Args:
        words: for `train`; options: for `launch`.
        deaf: they stand still there also when they are asked to end; by_mpirun: without `launch`.
        path: what comes first on their PYTHONPATH; anything of its own is read while a rank starts, cold.
    """

    def __init__(
        self,
        folder: Path,
        phase: str,
        *words: str,
        options: Sequence[str] = ("-n", "2"),
        deaf: bool = False,
        by_mpirun: bool = False,
        path: Path = ROOT,
        mpi: str = OWN,
    ):
        self.folder, self.run_dir = folder, folder / "run"
        self.ranks = folder / f"ranks-{len(list(folder.glob('ranks-*')))}"
        self.ranks.mkdir(parents=True)
        train = ["train", str(JOB), "--quiet", "--run-dir", str(self.run_dir), *words]
        python, _ = find_mpi(mpi)
        command = [str(python), "-m", "mpitrain", "launch", *options, *train]
        if by_mpirun:
            _, mpirun = find_mpi()
            command = [str(mpirun), "--oversubscribe", "-n", "2", sys.executable, "-m", "mpitrain", *train]
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
        env = {**os.environ, **root, "PYTHONPATH": f"{path}:{ROOT}", "SIGNALLED": str(folder), "PHASE": phase}
        env |= {"DEAF": "1"} if deaf else {}
        if path == ROOT:
            env = warm_environment(env, self.ranks, mpi)
        with open(folder / "out", "ab") as out:
            self.process = subprocess.Popen(
                command,
                env=env,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def wait_until_at(self, *ranks: int) -> list[int]:
        """Their process numbers, once they stand still there."""
        paths = [self.folder / f"at-{rank}" for rank in ranks]
        deadline_s = time.monotonic() + DEADLINE_S
        while not all(path.exists() for path in paths):
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                self.kill()
                raise AssertionError(f"ranks {ranks} did not come to {paths}:\n{self.told()}")
            time.sleep(0.02)
        return [int(path.read_text()) for path in paths]

    def wait_until_written(self) -> int:
        """The mark of the periodic checkpoint before the place; a thread writes it."""
        while not (mark := self.checkpoint_at()):
            assert self.process.poll() is None, self.told()
            time.sleep(0.02)
        return mark

    def code(self) -> int:
        """The exit code; nothing of the session may be left then."""
        try:
            code = self.process.wait(DEADLINE_S)
            deadline_s = time.monotonic() + 5
            while living(self.process.pid, self.ranks) and time.monotonic() < deadline_s:
                time.sleep(0.02)
            assert living(self.process.pid, self.ranks) == {}, self.told()
        finally:
            self.kill()
        return code

    def kill(self) -> None:
        """Whatever is left."""
        for pid in living(self.process.pid, self.ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def told(self) -> str:
        return (self.folder / "out").read_text()

    def checkpoint_at(self) -> int:
        """Accepted samples at the newest checkpoint, 0 without one."""
        found = newest(self.run_dir) if (self.run_dir / "checkpoints").exists() else None
        return found.checkpoint_at if found else 0

    def result(self) -> dict[str, object]:
        path = self.run_dir / "result.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}
