"""Jobs of `mpitrain launch` in sessions of their own, and what their ranks note."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring.measurement import ROOT
from mpitrain.system.launched.launch_variables import launched_rank

DEADLINE_S = 420
TCP = "--mca pml ob1 --mca btl self,tcp --mca btl_tcp_if_include lo"
TRANSPORTS = {"shared memory": "", "tcp": TCP}


def launch(
    run_dir: Path,
    ranks: int,
    job: Path,
    words: Sequence[str],
    host_args: str,
    env: dict[str, str],
    level: str = "ulfm",
) -> Any:
    """Start a job and return the process, its output in `run_dir/out`."""
    command = [sys.executable, "-m", "mpitrain", "launch", "-n", str(ranks)]
    command += ["--ft", level] if level else []
    command += [f"--host-args={host_args}"] if host_args else []
    command += ["train", str(job), "--quiet", "--run-dir", str(run_dir), *words]
    run_dir.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "PYTHONPATH": search_path(job.parent), **env}
    with open(run_dir / "out", "w") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )


def search_path(*folders: Path) -> str:
    """Where a job finds this repository, what benchmarks share, and the modules of these folders."""
    places = (ROOT, ROOT / "benchmarks", *folders, os.environ.get("PYTHONPATH", ""))
    return os.pathsep.join(filter(None, map(str, places)))


def finish(process: Any) -> bool:
    """Whether it came to its end by itself."""
    try:
        process.wait(DEADLINE_S)
        return True
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)
        return False


def note(folder: Path, name: str, **values: Any) -> None:
    """One line of what this rank has to tell."""
    rank = launched_rank() or 0
    with open(folder / f"{name}-{rank}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"rank": rank, **values}) + "\n")


def notes(folder: Path, name: str) -> list[dict[str, Any]]:
    """What the ranks have noted under `name`."""
    files = sorted(folder.glob(f"{name}-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


class NotedOs:
    """The module `os` for `mpi/faults/self_destruct.py`: a rank that kills itself says so first."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        return self._kill if name == "kill" else getattr(os, name)

    def _kill(self, pid: int, number: int) -> None:
        if pid == os.getpid():
            note(self._folder, "killed", at_s=time.monotonic(), pid=pid)
        os.kill(pid, number)
