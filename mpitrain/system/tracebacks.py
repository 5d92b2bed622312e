"""Where an error came from, in the user's words: of a job's own error only the frames from the job on.

Invariants: what begins in the user's own code, and what has no frame of it, is shown whole.
"""

import sysconfig
import traceback
from pathlib import Path

_OURS = str(Path(__file__).resolve().parents[1]) + "/"
_INSTALLED = tuple({sysconfig.get_path(name) + "/" for name in ("stdlib", "purelib", "platlib")})


def is_users(path: str) -> bool:
    """Whether a file of code is neither ours nor a library's."""
    return not path.startswith((_OURS, *_INSTALLED))


def own_part(error: BaseException) -> str:
    """The traceback, without what lies above the user's function that we have called."""
    trace = error.__traceback__
    called = False
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name.startswith(_OURS):
            called = True
        elif not name.startswith(("<", *_INSTALLED)):
            break
        trace = trace.tb_next
    if trace is None or not called:
        trace = error.__traceback__
    return "".join(traceback.TracebackException(type(error), error, trace).format())
