"""Writing files for people to edit: templates and examples, all of them or none, and never over what is there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mpitrain.errors import UsageError
from mpitrain.system.files.atomic import write_whole

_SHOWN = 3


def write_new(folder: Path, texts: Mapping[str, str]) -> None:
    """Write texts to files of these names in a folder, which is made if need be.

    Raises:
        UsageError: a file or link of such a name is there, and nothing was written; or a file cannot be written.
    """
    try:
        there = [
            str(folder / name) for name in texts if (folder / name).is_symlink() or (folder / name).exists()
        ]
        if there:
            more = f" and {len(there) - _SHOWN} more" if len(there) > _SHOWN else ""
            raise UsageError(
                f"{', '.join(there[:_SHOWN])}{more}: already there, and nothing was written; name another folder, or "
                "move them away"
            )
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, text)
    except OSError as error:
        raise UsageError(
            f"cannot write {error.filename or folder}: {error.strerror}; name another folder"
        ) from None
