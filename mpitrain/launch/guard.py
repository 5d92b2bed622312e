"""Starting the process that ends a launch's ranks if the launch is killed (`left_alone.py`)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from subprocess import DEVNULL, PIPE, Popen

from mpitrain.launch.discover import own_python
from mpitrain.system.processes import identity


@contextlib.contextmanager
def guarded(launcher: int, **facts: object) -> Iterator[None]:
    """Inside, the launcher with this process number does not outlive us. `facts`: what a `Supervisor` is made of."""
    guard = Popen(
        [
            *own_python(),
            "-m",
            "mpitrain.launch.left_alone",
            json.dumps({"launcher": identity(launcher), **facts}),
        ],
        stdin=PIPE,
        stdout=DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.kill()
        guard.communicate()
