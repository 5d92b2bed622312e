"""Which process a number means: numbers are used again, and every PID namespace (a container's) has its own.

Invariants: an identity is one word that can be written down and compared anywhere: the machine's boot, the PID
namespace, the number there, and when the process began. No process is signalled by its number alone. Standard library
only.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def identity(pid: int | None = None) -> str:
    """`BOOT:NAMESPACE:PID:START` of a process of our own PID namespace, this one by default; empty if there is none."""
    pid = os.getpid() if pid is None else pid
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat(f"/proc/{pid}/ns/pid").st_ino
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *rest = stat.rsplit(")", 1)[1].split()
    return "" if state in "ZX" else f"{boot}:{namespace}:{pid}:{rest[18]}"


def age_s() -> float:
    """Seconds since this process began; 0 where nobody knows."""
    try:
        stat = Path("/proc/self/stat").read_text()
        began_s = int(stat.rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
    except (OSError, ValueError, AttributeError):
        return 0.0


def place(process: str) -> str:
    """From where a process can be ended: its machine and PID namespace."""
    return ":".join(process.split(":")[:2])


def is_visible(process: str) -> bool:
    """Whether its number means something here: the same machine and the same PID namespace."""
    return bool(process) and place(process) == place(identity())


def is_gone(process: str) -> bool:
    """Whether it is known to have ended; of one that cannot be seen from here nothing is known."""
    return is_visible(process) and identity(_number(process)) != process


def runs(process: str) -> bool:
    """Whether it is known to be there, and not stopped."""
    if not is_visible(process) or is_gone(process):
        return False
    try:
        stat = Path(f"/proc/{_number(process)}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] not in "Tt"


def send_signal(process: str, number: signal.Signals) -> bool:
    """Send a signal to this very process, and to no other that has got its number since; whether it was sent."""
    if not is_visible(process):
        return False
    try:
        handle = os.pidfd_open(_number(process))
    except OSError:
        return False
    try:
        if identity(_number(process)) != process:  # what `handle` holds may be its successor
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def _number(process: str) -> int:
    return int(process.split(":")[2])
