"""The tensors of a part on disk: written and read once, piece by piece, and digested on the way.

Invariants: no byte is passed over twice: a piece is digested while the processor has it in its cache, on its way to the
disk or from there to its tensor. Beside the tensors a few megabytes are held. What was read counts for nothing until
its digest has been compared.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from mpitrain.checkpoint.tensor_file import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    body,
    describe,
    described_by,
    header,
    order_of,
    room_of,
    settle,
)
from mpitrain.system.files.atomic import write_all

PIECE_BYTES = 2**22


class Payload:
    """Tensors that are yet to be written. `digest`: of what has been."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        described = describe(tensors)
        self._head = header(described)
        self._tensors = [tensors[name] for name in order_of(described)]
        self.num_bytes = len(self._head) + sum(one.num_bytes for one in described.values())
        self.digest = hashlib.sha256()

    def write(self, path: Path, room: int | None = None, between: Callable[[], object] | None = None) -> None:
        """Write the file; the disk takes each piece while the next ones are digested. `room`: bytes after which the
        disk is full; `between`: is called after each piece.

        Raises:
            OSError: the disk is full or not writable.
        """
        at = 0
        with open(path, "wb", buffering=0) as file:
            for piece in self._pieces():
                self.digest.update(piece)
                write_all(file, piece if room is None else piece[: max(0, room - at)])
                with contextlib.suppress(
                    OSError
                ):  # the call by which Linux begins to write what is in its cache
                    os.posix_fadvise(file.fileno(), at, len(piece), os.POSIX_FADV_DONTNEED)
                at += len(piece)
                if between is not None:
                    between()
        if room is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _pieces(self) -> Iterator[memoryview]:
        for whole in itertools.chain([memoryview(self._head)], map(body, self._tensors)):
            for at in range(0, len(whole), PIECE_BYTES):
                yield whole[at : at + PIECE_BYTES]


def digest_of(file: Any) -> str:
    """The SHA-256 of the rest of a file of which nothing is kept."""
    return _digest_rest(file, hashlib.sha256())


def _digest_rest(file: Any, digest: Any) -> str:
    while piece := file.read(PIECE_BYTES):
        digest.update(piece)
    return str(digest.hexdigest())


def read(file: Any, num_bytes: int) -> tuple[str, dict[str, torch.Tensor], Exception | None]:
    """All of a file of `num_bytes`: its SHA-256, its tensors by name, and why it holds none, where its header is none
    of this length; then the rest is digested all the same, for it says whether the file is damaged."""
    digest = hashlib.sha256()
    length = file.read(LENGTH_BYTES)
    text = file.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES, num_bytes))
    digest.update(length + text)
    tensors, why_not = {}, None
    try:
        described = described_by(text, num_bytes - LENGTH_BYTES - len(text))
        tensors = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in described.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError) as error:
        why_not = error
    for tensor in tensors.values():
        room = room_of(tensor)
        for at in range(0, len(room), PIECE_BYTES):
            piece = room[at : at + PIECE_BYTES]
            digest.update(piece[: file.readinto(piece)])
        settle(tensor)
    return _digest_rest(file, digest), tensors, why_not
