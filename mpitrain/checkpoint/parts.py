"""A checkpoint on disk: a folder of parts, each written by one rank without asking the others.

    RUN_DIR/checkpoints/000000012800/shard-0.json  shard-0.safetensors  shard-1.json ...  worker-0.json ...

Law of this file: a part is there when its JSON is, for that is renamed into place last, after its tensors and after
both have been fsynced; it holds the SHA-256 of the tensors and of itself. A checkpoint is complete when its first part
(`shard-0`) names parts that are all there and verify. So a rank that dies while writing, a full disk or a flipped bit
leaves the previous checkpoint the newest complete one, and that is what is loaded.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.errors import CheckpointError

SCHEMA = 1
FOLDER = "checkpoints"
FIRST = "shard-0"


class Checkpoint(NamedTuple):
    """A complete, verified checkpoint: `folder`, `mark` (accepted samples), `parts` (names), what its first part says
    `about` the run, and why the folders that were passed over on the way to it were `refused`."""

    folder: Path
    mark: int
    parts: tuple[str, ...]
    about: Any
    refused: tuple[str, ...] = ()


class _UnfinishedError(CheckpointError):
    """A part was never written to its end: its writer died, or is still at it."""


def folder_of(run_dir: Path, mark: int) -> Path:
    """Where the checkpoint at `mark` samples lies."""
    return run_dir / FOLDER / f"{mark:012d}"


def write_part(
    folder: Path,
    name: str,
    state: Any,
    needs: Sequence[str] = (),
    about: Any = None,
    disk_full: bool = False,
) -> int:
    """Write one part; returns its bytes. `needs`: all parts of the checkpoint (its first part knows). `disk_full`: fail
    half-way, as ordered by `--inject`.

    Raises:
        CheckpointError: the disk is full or not writable; nothing half-written stays.
    """
    from safetensors.torch import save

    from mpitrain.checkpoint.tree import split

    structure, tensors = split(state)
    payload = save(tensors)
    record = {
        "schema": SCHEMA,
        "part": name,
        "needs": list(needs),
        "about": about,
        "num_bytes": len(payload),
        "sha256": hashlib.sha256(payload).hexdigest(),
        "state": structure,
    }
    text = json.dumps(record | {"self": _digest(record)}).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / f"{name}.safetensors", payload, disk_full)
        _write(folder / f"{name}.json", text)
        _sync(folder)
    except OSError as error:
        raise CheckpointError(
            f"cannot write checkpoint part {folder / name}: {error.strerror or error}; the checkpoints before it are "
            "untouched"
        ) from error
    return len(payload) + len(text)


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def corrupt_part(folder: Path, name: str) -> None:
    """Flip a bit in the middle of its tensors, as ordered by `--inject`."""
    path = folder / f"{name}.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _write(path: Path, data: bytes, disk_full: bool = False) -> None:
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with open(beside, "wb") as file:
            if disk_full:
                file.write(data[: len(data) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some parallel file systems know no fsync of a folder
            os.fsync(handle)
    finally:
        os.close(handle)


def _read_record(folder: Path, name: str) -> dict[str, Any]:
    path = folder / f"{name}.json"
    try:
        record = json.loads(path.read_bytes())
        said = record.pop("self")
    except FileNotFoundError as error:
        raise _UnfinishedError(f"{path} was never finished") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if said != _digest(record):
        raise CheckpointError(f"{path} is damaged: its checksum does not match")
    if record["schema"] != SCHEMA:
        raise CheckpointError(f"{path} has schema {record['schema']}; this version reads {SCHEMA}")
    return dict(record)


def _read_payload(folder: Path, name: str, record: dict[str, Any]) -> bytes:
    path = folder / f"{name}.safetensors"
    try:
        payload = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if len(payload) != record["num_bytes"] or hashlib.sha256(payload).hexdigest() != record["sha256"]:
        raise CheckpointError(f"{path} is damaged: {len(payload)} bytes, and its checksum does not match")
    return payload


def read_part(folder: Path, name: str) -> Any:
    """The state of one part, verified.

    Raises:
        CheckpointError: not there, damaged, or of another schema.
    """
    from safetensors.torch import load

    from mpitrain.checkpoint.tree import join

    record = _read_record(folder, name)
    return join(record["state"], load(_read_payload(folder, name, record)))


def verify(folder: Path) -> tuple[tuple[str, ...], Any]:
    """Names of all parts of a complete checkpoint, and what its first part says about the run.

    Raises:
        CheckpointError: what is missing or damaged.
    """
    first = _read_record(folder, FIRST)
    for name in first["needs"]:
        _read_payload(folder, name, _read_record(folder, name))
    return tuple(first["needs"]), first["about"]


def listed(run_dir: Path) -> list[Path]:
    """Every checkpoint folder, complete or not, the newest first."""
    found = (run_dir / FOLDER).glob("[0-9]" * 12)
    return sorted((path for path in found if path.is_dir()), reverse=True)


def newest(run_dir: Path) -> Checkpoint | None:
    """The newest checkpoint that verifies, or None where none was ever finished.

    Raises:
        CheckpointError: there are checkpoints, and none of them verifies.
    """
    refused, damaged = [], False
    for folder in listed(run_dir):
        try:
            parts, about = verify(folder)
        except CheckpointError as error:
            refused.append(str(error))
            damaged = damaged or not isinstance(error, _UnfinishedError)
            continue
        return Checkpoint(folder, int(folder.name), parts, about, tuple(refused))
    if damaged:
        raise CheckpointError(f"no checkpoint under {run_dir / FOLDER} verifies: " + "; ".join(refused))
    return None


def prune(run_dir: Path, keep: int) -> None:
    """Remove all but the `keep` newest complete checkpoints, and incomplete ones older than these."""
    complete = 0
    for folder in listed(run_dir):
        if complete >= keep:
            shutil.rmtree(folder, ignore_errors=True)
            continue
        with contextlib.suppress(CheckpointError):
            parts = _read_record(folder, FIRST)["needs"]
            complete += all((folder / f"{name}.json").is_file() for name in parts)
