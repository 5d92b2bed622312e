"""A home directory where the environment names none: Open MPI does not start without one.

Invariants: one that is named stays. Standard library only.
"""

from __future__ import annotations

import os
import pwd
import tempfile


def give_home() -> None:
    """Name the user's own, or, of a user whom nobody knows, as in a container, the folder for what is temporary."""
    if not os.environ.get("HOME"):
        try:
            os.environ["HOME"] = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            os.environ["HOME"] = tempfile.gettempdir()
