"""What an error leaves behind: the exit code of its process, and a record in the run directory."""

from __future__ import annotations

import json
import socket
import time
import traceback
from pathlib import Path
from typing import Protocol

from mpitrain.errors import EXIT_ERROR, EXIT_INTERRUPTED, MpitrainError
from mpitrain.system import interrupts
from mpitrain.system.files.folders import make_private


class Whose(Protocol):
    """The rank that has met an error."""

    role: str
    step: int

    @property
    def launched_rank(self) -> int: ...


def exit_code(error: BaseException) -> int:
    """The exit code of the process: the error's own if it is ours, 130 after an interrupt, 1 otherwise."""
    if is_interrupt(error):
        return EXIT_INTERRUPTED
    return error.exit_code if isinstance(error, MpitrainError) else EXIT_ERROR


def is_interrupt(error: BaseException) -> bool:
    """True if this rank got SIGINT: C++ code that runs at that moment, such as torch's backward pass, raises another
    error, which keeps the interrupt's name or has it as its context."""
    if interrupts.heard():
        return True
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        if isinstance(current, KeyboardInterrupt) or "KeyboardInterrupt" in str(current):
            return True
        seen.append(current)
        current = current.__cause__ or current.__context__
    return False


def write_record(rank: Whose, run_dir: Path, error: BaseException) -> None:
    """Write run_dir/errors/rank-N.json. Raises OSError where that cannot be done."""
    record = {
        "rank": rank.launched_rank,
        "role": rank.role,
        "step": rank.step,
        "host": socket.gethostname(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "type": type(error).__name__,
        "message": str(error),
        "exit_code": exit_code(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    folder = make_private(Path(run_dir), "errors")
    (folder / f"rank-{rank.launched_rank}.json").write_text(json.dumps(record, indent=1) + "\n")


def forget_reports(run_dir: Path) -> None:
    """Delete the marks of what earlier starts have reported, so that this start reports it again."""
    for path in (run_dir / "errors").glob("reported-*"):
        path.unlink(missing_ok=True)
