"""Where an error came from, in the user's words: of a job's own error only the frames from the job on.

Invariants: what begins in the user's own code, and what has no frame of it, is shown whole. Of what lies below the
user's line torch's frames are left out: they say how torch calls a layer, and not which.
"""

import linecache
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import TypeVar

_OURS = str(Path(__file__).resolve().parents[1]) + "/"
# An environment may borrow packages from another one, as with --system-site-packages.
_PACKAGES = {sysconfig.get_path(name) for name in ("purelib", "platlib")} | {
    path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")
}
_INSTALLED = tuple({path + "/" for path in (sysconfig.get_path("stdlib"), *_PACKAGES)})
_TORCH = tuple({f"{path}/torch/" for path in _PACKAGES})

E = TypeVar("E", bound=BaseException)


def is_users(path: str) -> bool:
    """Whether a file of code is neither ours nor a library's."""
    return not path.startswith((_OURS, *_INSTALLED))


def users_frames(error: BaseException) -> list[tuple[FrameType, int]]:
    """The user's own frames of it with their lines, the one where it happened last."""
    return [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_users(frame.f_code.co_filename)
    ]


def place_of(frame: FrameType, number: int) -> tuple[str, str]:
    """A line of code, and where it stands."""
    path = frame.f_code.co_filename
    return linecache.getline(path, number).strip(), f"{path}, line {number}"


def own_part(error: BaseException) -> str:
    """The traceback, without what lies above the user's function that we have called, and without torch's part of what
    lies below. The last line names the error, which whoever reports it says, too."""
    return "".join(_shown(error).format())


def frames(error: BaseException) -> str:
    """The same without that last line, for who goes on with it; empty where the error has no place."""
    shown = _shown(error)
    if isinstance(error, SyntaxError):  # whose place is no frame
        return "".join(shown.format())
    if not shown.stack and shown.__cause__ is None and shown.__context__ is None:
        return ""
    text, last = "".join(shown.format()), next(iter(shown.format_exception_only()))
    before, _, after = text.rpartition(last)
    return before + after


def _shown(error: BaseException) -> traceback.TracebackException:
    shown = traceback.TracebackException(type(error), error, _from_user_on(error))
    _leave_torch_out(shown)
    return shown


def _from_user_on(error: BaseException) -> TracebackType | None:
    trace = error.__traceback__
    called = False
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name.startswith(_OURS):
            called = True
        elif not name.startswith(("<", *_INSTALLED)):
            break
        trace = trace.tb_next
    return error.__traceback__ if trace is None or not called else trace


def _leave_torch_out(shown: traceback.TracebackException) -> None:
    below = False
    kept = []
    for frame in shown.stack:
        below = below or is_users(frame.filename)
        if not (below and frame.filename.startswith(_TORCH)):
            kept.append(frame)
    shown.stack[:] = kept
    for other in (shown.__cause__, shown.__context__):
        if other is not None:
            _leave_torch_out(other)


def shortened(error: E) -> E:
    """The error, whose traceback begins anew where it is raised again and, where it comes from a function of the user's
    that we have called, goes on with that one: what a notebook shows is the user's lines."""
    trace = _from_user_on(error)
    if trace is error.__traceback__ or trace is None:
        return error
    kept = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_TORCH):
            kept.append(trace)
        trace = trace.tb_next
    rest: TracebackType | None = None
    for one in reversed(kept):
        rest = TracebackType(rest, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return error.with_traceback(rest)
