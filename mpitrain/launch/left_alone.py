"""What outlives a killed `mpitrain launch` to end its launcher and its ranks; `guard.py` starts it as a program.

Invariants: it sees the end of its launch by the end of a pipe, whatever ended it, in a session of its own, which no
signal to the launch's reaches. From there on it does what the launch would have done at TERM: ranks are asked for a
checkpoint and an end, and those that do not listen are ended. Where the launcher has ended before, it does nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import cast

from mpitrain.launch.left_behind import remove_left_behind
from mpitrain.launch.supervision import Requests, Supervisor
from mpitrain.launch.watch import Watch
from mpitrain.system.launched import rank_status
from mpitrain.system.processes import is_gone, send_signal

_POLL_S = 0.1


class Adopted:
    """The launcher of another launch, by its identity, as a `Supervisor` sees a child."""

    def __init__(self, process: str):
        self.process = process
        self.pid = int(process.split(":")[2])

    def poll(self) -> int | None:
        return 0 if is_gone(self.process) else None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code is not known: 0.

        Raises:
            TimeoutExpired: as of a child.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise TimeoutExpired(self.process, timeout or 0.0)
            time.sleep(_POLL_S)
        return 0

    def send_signal(self, number: int) -> None:
        send_signal(self.process, signal.Signals(number))


def main() -> None:
    """Wait for the end of the launch, and end what it has left."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    facts = json.loads(sys.argv[1])
    sys.stdin.buffer.read()
    if not facts["launcher"] or is_gone(facts["launcher"]):
        return
    with contextlib.suppress(OSError):  # whoever read it may be gone with the launch
        os.write(2, b"mpitrain: the launch was killed: its ranks are asked for a checkpoint, then ended\n")
    requests = Requests()
    requests.hear(signal.SIGTERM)
    folder = Path(facts["folder"]) if facts["folder"] else None
    supervisor = Supervisor(
        facts["flavour"], requests, folder, Watch(*facts["watch"]) if facts["watch"] else None,
        trains=facts["trains"], survives_deaths=facts["survives_deaths"],
    )  # fmt: skip
    supervisor.take_over(cast("Popen[bytes]", Adopted(facts["launcher"])))
    if folder is not None:
        rank_status.remove_folder(folder)
    remove_left_behind()


if __name__ == "__main__":
    main()
