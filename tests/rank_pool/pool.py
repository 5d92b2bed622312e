"""The servers of warm ranks (`server.py`): one for each Python that tests use, kept up while pytest runs."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
AT_START = HERE.parent / "at_start"
# What an interpreter or a library reads only while it starts: ranks that need it otherwise are started cold.
_READ_AT_START = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "LD_", "TORCH_", "KMP_", "GOMP_")


class Pool:
    """One server, started when it is first needed and again after it has ended.

    Args:
        python: whose ranks it forks; environ: what it is started with.
    """

    def __init__(self, python: Path, environ: Mapping[str, str]):
        self.python = python
        # a rank measures itself, from its fork on
        left_out = ("PYTHONPATH", "RANK_POOL", "COVERAGE_PROCESS_START")
        self.environ = {name: value for name, value in environ.items() if name not in left_out}
        # coverage has to see a rank import the package
        self._preloads = "without-package" if "COVERAGE_PROCESS_START" in environ else "with-package"
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.mkdtemp(prefix="pool-")

    def client(self, folder: str, argv: Sequence[str]) -> list[str]:
        """The command that runs `python *argv` in a warm process; the server names a file in `folder` after it."""
        return [str(self.python), "-I", "-S", str(HERE / "client.py"), self._address(), folder, *argv]

    def variables(self, folder: str, environ: Mapping[str, str]) -> dict[str, str]:
        """`environ` with what makes the ranks warm that are started in it, however: see `at_start/`."""
        path = os.pathsep.join(filter(None, [str(AT_START), environ.get("PYTHONPATH", "")]))
        pool = os.pathsep.join([str(self.python.parent.parent), self._address(), folder])
        return {**environ, "PYTHONPATH": path, "RANK_POOL": pool}

    def _address(self) -> str:
        """Of the server, which is there then."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._folder = tempfile.mkdtemp(prefix="pool-")
            self._process = self._start(f"{self._folder}/socket")
        return f"{self._folder}/socket"

    def _start(self, address: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [str(self.python), "-P", str(HERE / "server.py"), address, self._preloads],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environ,
            cwd="/",
            start_new_session=True,
        )
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the rank pool of {self.python} did not start: exit code {process.wait()}")
        return process

    def close(self) -> None:
        """End the server and its ranks."""
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.close()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
            self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)


_pools: dict[Path, Pool] = {}


def pool_of(python: Path, environ: Mapping[str, str]) -> Pool:
    """The pool of this Python, in this process."""
    if python not in _pools:
        _pools[python] = Pool(python, environ)
    return _pools[python]


def may_be_warm(python: Path, argv: Sequence[str], extra: Mapping[str, str]) -> bool:
    """Whether `argv` is this Python with a program, and nothing in `extra` is read only while it starts."""
    if len(argv) < 2 or Path(argv[0]) != python or ":" in argv:
        return False
    if argv[1].startswith("-") and argv[1] not in ("-c", "-m"):
        return False
    return not any(name.startswith(_READ_AT_START) and name != "PYTHONPATH" for name in extra)


@atexit.register
def close_all() -> None:
    """End every pool of this process."""
    for pool in _pools.values():
        pool.close()
    _pools.clear()
