"""The terminal of a launch: what it sends reaches the launch alone, and what is typed reaches the ranks.

Invariants: the MPI launcher runs in a session of its own, without the terminal, since Open MPI's kills its ranks at
INT, QUIT and HUP, which a terminal sends to all that it finds. So lines that are typed are handed on: rank 0 may stand
in a debugger. A launch in the background reads nothing, which would stop it.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence

from mpitrain.system import background

_LOOK_S = 0.5


def has_terminal() -> bool:
    """Whether this process has a terminal, which sends INT, QUIT and HUP to whole groups of processes."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def start(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a launcher. Raises OSError where that cannot be done."""
    if not has_terminal():
        return subprocess.Popen(list(command), env=dict(env))
    typed = os.isatty(0)
    child = subprocess.Popen(
        list(command), env=dict(env), start_new_session=True, stdin=subprocess.PIPE if typed else None
    )
    if typed:
        background.start("typed", _hand_on, child)
    return child


def _hand_on(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    pipe = child.stdin.fileno()
    try:
        while child.returncode is None:
            if os.tcgetpgrp(0) != os.getpgrp():
                time.sleep(_LOOK_S)
            elif select.select([0], [], [], _LOOK_S)[0]:
                if not (text := os.read(0, 4096)):
                    break
                os.write(pipe, text)
    except OSError:  # the terminal is gone, or the launcher
        pass
    try:
        child.stdin.close()
    except OSError:
        pass
