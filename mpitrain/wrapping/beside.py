"""What a strategy keeps, written beside the checkpoints of a framework, and the end of one training where another may
follow.

A framework's checkpoint holds the model, its own loops and schedulers. What it cannot know of (shards of servers,
residuals, what workers hold apart) lies in a folder beside it, as `mt.save` writes it: `FOLDER/NAME/checkpoints/STEP`.

Invariants: a checkpoint of the framework names the one folder that belongs to it (`save_beside`), so that one is never
taken for another's; the earlier ones are removed when the framework's is written (`keep_only`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from mpitrain.errors import UsageError
from mpitrain.wrapping import loop
from mpitrain.wrapping.exchange import end_exchanges

_last: tuple[int, Path] | None = None  # what this process has written last, and where


def save_beside(folder: Path, step: int) -> str:
    """Write what belongs to this step; collective over workers, and complete when all have returned.

    Returns:
        Its name in `folder`, for the framework's own checkpoint; empty where nothing is there to go on from: before
        the first step, and after the last one where servers or peers have left since and nothing was written at it.
    """
    global _last
    current = loop._current()
    if not step:
        return ""
    name = f"{current.saver.run.new.run}-{step}"
    place = folder.resolve() / name
    if current.finished and current.strategy.sends_messages:
        if _last is None or _last[0] != step or not _last[1].is_dir():
            return ""
        if loop.worker_index() == 0 and _last[1] != place:
            shutil.copytree(_last[1], place, dirs_exist_ok=True)
        return name
    current.saver.save(place, step, None, keep=0)
    _last = step, place
    return name


def keep_only(folder: Path, name: str) -> None:
    """Remove what earlier checkpoints of the same name had; by one worker, once all have written."""
    for other in folder.iterdir() if folder.is_dir() else ():
        if other.name != name:
            shutil.rmtree(other, ignore_errors=True)
    if not name:
        shutil.rmtree(folder, ignore_errors=True)


def find_beside(folder: Path, name: str, checkpoint: object) -> Path:
    """The directory for `mt.wrap(resume=)`.

    Raises:
        UsageError: the framework's checkpoint was written when there was nothing to go on from, or was moved alone.
    """
    if not name:
        raise UsageError(
            f"{checkpoint} holds the model alone, for it was written after training had ended: go on from one that was "
            "written while training, or load its weights into the model and begin anew"
        )
    if not (folder / name).is_dir():
        raise UsageError(
            f"{checkpoint} belongs to {folder / name}, which is not there: copy {folder.name}/ along with it, for the "
            "optimizer's state lies in there"
        )
    return folder / name


def begin_anew() -> None:
    """Let the next `mt.wrap` be the first of a training of its own, if one has ended in this process.

    Raises:
        UsageError: servers have left with the end of the first.
    """
    global _last
    before = loop._wrapped
    if before is None:
        return
    if before.roles.servers:
        raise UsageError(
            f"{before.strategy}: its servers have left at the end of the first training, and this is a second one in "
            "the same process: train once a script, or under a strategy without servers"
        )
    loop.finish()
    end_exchanges()
    loop._wrapped = _last = None
