"""What a check is: what a fit node has, and how a check answers.

Invariants: a check returns what it saw, or raises `Unfit` with what was seen and, where there is one, the way out.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple


class Unfit(Exception):
    """A check failed; the message says what was seen."""


class Seen(NamedTuple):
    """What a check saw, with what it measured: `judge.py` compares that with what other nodes measured."""

    detail: str
    figures: Mapping[str, float] = MappingProxyType({})


class Check(NamedTuple):
    """The outcome of one check."""

    name: str
    ok: bool
    detail: str
    figures: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Wanted:
    """What a fit node has.

    Attributes:
        gpus: how many devices; `None`: as many as Slurm has given this node, 0 outside it.
        devices: pattern of the device files; empty: ask torch. Variables are expanded on the node.
        disk: directory for large files, the node's own; variables are expanded on the node.
        shared: directory on the shared file system.
        data: an HDF5 file to read from; empty: one that is written first.
        min_shm_gib: free in /dev/shm, through which ranks of one node talk.
        min_open_files: a rank has a socket for each rank that it talks to.
        min_free_inodes: files that can still be made on `disk` and on `shared`.
        speed_s: how long each speed is measured; 0: not at all.
    """

    gpus: int | None = None
    devices: str = ""
    disk: str = "$TMPDIR"
    shared: str = "."
    data: str = ""
    min_memory_gib: float = 1.0
    min_free_gib: float = 1.0
    min_shm_gib: float = 0.05
    min_open_files: int = 1024
    min_free_inodes: int = 1000
    speed_s: float = 1.0

    @property
    def num_gpus(self) -> int:
        """How many devices there should be."""
        given = os.environ.get("SLURM_GPUS_ON_NODE", "")
        return self.gpus if self.gpus is not None else int(given) if given.isdigit() else 0


Asked = Callable[[Wanted], str | Seen]


def directory(text: str) -> str:
    """A directory by a text with variables, or the system's for temporary files where `$TMPDIR` is not set.

    Raises:
        Unfit: another variable is not set here.
    """
    expanded = os.path.expandvars(text)
    if not expanded or expanded == "$TMPDIR":
        return tempfile.gettempdir()
    if "$" in expanded:
        raise Unfit(f"{text}: a variable in it is not set on this node")
    return expanded
