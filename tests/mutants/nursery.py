"""A process that has imported what takes long, and forks one that runs tests for every line it reads.

    {"tests": [...], "cpu_s": limit, "wall_s": limit}  ->  {"code": ..., "cpu_s": ..., "wall_s": ..., "said": ...}

Invariants: it imports nothing that a fault can be planted in, so every fork reads the files as they are by then.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
from typing import Any

import h5py
import hypothesis
import numpy
import pytest
import safetensors.torch
import torch
import torch._dynamo

IMPORTED = (h5py, hypothesis, numpy, pytest, safetensors.torch, torch, torch._dynamo)
hypothesis.settings.register_profile(  # an example that fails is enough: none is looked for that is smaller
    "mutants", phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]
)
hypothesis.settings.load_profile("mutants")
_OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", "-m", ""]


def run(order: dict[str, Any]) -> dict[str, Any]:
    """Run tests in a fork; a code below 0 is the signal that has ended it, at a limit for one."""
    began_s = time.monotonic()
    with tempfile.TemporaryFile() as said:
        pid = os.fork()
        if not pid:
            _be_child(order, said.fileno())
        status, used = _wait(pid, began_s + order["wall_s"])
        said.seek(0)
        text = said.read().decode(errors="replace")
    return {
        "code": os.waitstatus_to_exitcode(status),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "wall_s": round(time.monotonic() - began_s, 1),
        "said": text,
    }


def _be_child(order: dict[str, Any], out: int) -> None:
    os.setsid()
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    resource.setrlimit(resource.RLIMIT_CPU, (int(order["cpu_s"]), int(order["cpu_s"]) + 5))
    code = 1
    try:
        code = int(pytest.main([*_OPTIONS, *order["tests"]]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int, until_s: float) -> tuple[int, resource.struct_rusage]:
    """The end of a fork; that of one that takes too long is made."""
    while True:
        found, status, used = os.wait4(pid, os.WNOHANG)
        if found:
            os.killpg(pid, signal.SIGKILL) if _has_group(pid) else None
            return status, used
        if time.monotonic() > until_s:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.02)


def _has_group(pid: int) -> bool:
    """Whether it has left processes behind."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """Until the end of input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
