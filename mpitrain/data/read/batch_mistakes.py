"""A batch that was taken for something else, such as `batch["image"]` on a tuple, told in one line: what it holds."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from mpitrain.data.read.batch import Batch, Pair, describe, values_of
from mpitrain.errors import MpitrainError
from mpitrain.system.tracebacks import place_of, users_frames

# What Python and torch say where something is indexed, or unpacked, that is of another kind.
_INDEXED = re.compile(
    r"KeyError|indices must be integers|index out of range|only integers|too many indices|not subscriptable|"
    r"item assignment|unhashable type: 'slice'|invalid data type 'str'"
)
_UNPACKED = re.compile(r"values to unpack|cannot unpack")


@contextlib.contextmanager
def explaining(owner: str, batch: Batch, kind: type[MpitrainError]) -> Iterator[None]:
    """Calls a function of the user's, `owner`, with a batch. An error that comes of taking the batch for something else
    is raised as one of this kind, which says so."""
    try:
        yield
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        text = None if isinstance(error, MpitrainError) else _explained(error, owner, batch)
        if text is None:
            raise
        raise kind(text) from None


def _explained(error: Exception, owner: str, batch: Batch) -> str | None:
    """What was taken for what; None where the error comes of something else."""
    if not (frames := users_frames(error)):
        return None
    frame, number = frames[-1]
    line, where = place_of(frame, number)
    named = isinstance(batch, Mapping | Pair)
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    if isinstance(key, str) and named and key not in batch:
        return f"{owner} asks for {key!r} ({where}), and a batch holds {_names(batch)}"
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    of_text = isinstance(batch, Mapping) and isinstance(error, TypeError | AttributeError) and "str" in said
    if of_text and (found := next((name for name, one in _locals(frames) if _is_name(one, batch)), None)):
        return f"{owner}: {said} ({where}): {found} is a name of the batch's, which holds {describe(batch)}"
    if getattr(error, "obj", None) is not batch:
        if isinstance(error, KeyError) and isinstance(batch, Mapping) and key in batch:
            return None
        indexed = bool(_INDEXED.search(said))
        if not (indexed or _UNPACKED.search(said) or f"not {type(batch).__name__}" in said):
            return None
        if not _mentions(frame, line, batch, r"\s*\[" if indexed else r"\b"):
            return None
    shown = f"`{line}`, " if line else ""
    return f"{owner}: {said} ({shown}{where}); a batch holds {describe(batch)}"


def _names(batch: Batch) -> str:
    held = ", ".join(map(repr, values_of(batch)))
    return (
        f"{held}: the arrays of the data, by name"
        if isinstance(batch, Mapping)
        else f"{held}: {describe(batch)}"
    )


def _locals(frames: list[tuple[FrameType, int]]) -> Iterator[tuple[str, Any]]:
    for frame, _ in reversed(frames):
        yield from frame.f_locals.items()


def _is_name(one: object, batch: Batch) -> bool:
    return isinstance(one, str) and any(one is name for name in batch)


def _mentions(frame: FrameType, line: str, batch: Batch, then: str) -> bool:
    """Whether a line has a variable that is the batch, with `then` behind it; of a line that cannot be read, whether
    its function has one."""
    names = [name for name, one in frame.f_locals.items() if one is batch]
    return any(not line or re.search(rf"\b{re.escape(name)}{then}", line) for name in names)
