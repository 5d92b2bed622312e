"""A checkpoint on disk: a folder of parts, each written by one rank without asking the others.

    RUN_DIR/checkpoints/000000012800/shard-0.json  shard-0.safetensors  shard-1.json ...  worker-0.json ...

Invariants: a part is there when its JSON is, for that is renamed into place last, after its tensors and after both have
been fsynced; one fsync of their folder makes both names last, and should a power cut keep the JSON's alone, the tensors
are missed or do not match. The JSON holds the SHA-256 of the tensors and of itself, and says which part it is, of which
checkpoint, run and attempt, and which version of mpitrain wrote it. A checkpoint is complete when its first part
(`shard-0`) names parts that are all there, belong to it and verify. So a rank that dies while it writes, a full disk, a
flipped bit, or a part that was renamed or comes from another start leaves the previous checkpoint the newest complete
one, and that one is loaded. Files may be hostile: only regular files inside the folder are read, and no more of them
than a part can have.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain import __version__
from mpitrain.errors import CheckpointError, UsageError
from mpitrain.system.files.atomic import all_durably_replaced
from mpitrain.system.files.folders import make_private
from mpitrain.system.files.part_places import found_at, place_of
from mpitrain.system.files.run_directory import (
    CHECKPOINTS,
    FIRST_PART,
    MAX_RECORD_BYTES,
    PART_NAME,
    Identity,
    folder_of,
    is_id,
    listed,
    open_regular,
    position_of,
    read_bounded,
    samples_of,
)

__all__ = [
    "FIRST",
    "FOLDER",
    "SCHEMA",
    "Checkpoint",
    "OtherSchemaError",
    "UnfinishedError",
    "candidates",
    "corrupt_part",
    "damage",
    "folder_of",
    "listed",
    "position_of",
    "newest",
    "nothing_verifies",
    "read_part",
    "survey",
    "verify",
    "write_part",
]

SCHEMA = 3
FOLDER = CHECKPOINTS
FIRST = FIRST_PART
MAX_PART_BYTES = 2**40
_PIECE_BYTES = 2**22
# What a part's JSON holds.
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "written_by": str,
    "part": str,
    "checkpoint_at": (int, type(None)),
    "run": str,
    "attempt": str,
    "resumed_from": (dict, type(None)),
    "parts": list,
    "about": (dict, type(None)),
    "num_bytes": int,
    "sha256": str,
    "state": dict,
}


class Checkpoint(NamedTuple):
    """A checkpoint whose parts are there.

    Attributes:
        folder: where it lies; parts: their names.
        checkpoint_at: accepted samples when it was written; in a loop of the user's own, the step.
        about: what the first part says of the run; identity: which run and which start of it wrote the checkpoint.
        refused: why newer folders were passed over.
    """

    folder: Path
    checkpoint_at: int
    parts: tuple[str, ...]
    about: dict[str, Any]
    identity: Identity
    refused: tuple[str, ...] = ()

    def part(self, name: str) -> Any:
        """The state of one part, or None where the checkpoint has none of that name."""
        return read_part(self.folder, name, self.identity) if name in self.parts else None

    def num_samples(self) -> int:
        """Accepted ones, which may be more than its name says."""
        return samples_of(self.folder)

    def shards(self) -> int:
        """How many shards it was written from."""
        return sum(name.startswith("shard-") for name in self.parts)

    def servers(self) -> list[dict[str, Any]]:
        """What the servers of these shards had counted, without the tensors."""
        names = [f"shard-{shard}" for shard in range(self.shards())]
        return [read_numbers(self.folder, name, "role", self.identity) for name in names]


class OtherSchemaError(UsageError, CheckpointError):
    """A checkpoint that another version of mpitrain has written."""


class UnfinishedError(CheckpointError):
    """A part was never written to its end, or not in this attempt: its writer died, or is still at it."""


def write_part(
    folder: Path,
    name: str,
    state: object,
    identity: Identity,
    parts: Sequence[str] = (),
    about: object = None,
    disk_full: bool = False,
) -> int:
    """Write one part; returns its bytes. `parts`, `about`: all of the checkpoint's, and what the run is (its first part
    knows). `disk_full`: fail half-way, as ordered by `--inject`.

    Raises:
        CheckpointError: the disk is full or not writable; nothing half-written stays.
        TypeError: the state holds what a checkpoint cannot.
    """
    from mpitrain.checkpoint.state_tree import split
    from mpitrain.checkpoint.tensor_file import body, describe, header, order_of

    structure, tensors = split(state)
    described = describe(tensors)
    head = header(described)
    num_bytes = len(head) + sum(one.num_bytes for one in described.values())
    payload = _Digested(itertools.chain([head], (body(tensors[name]) for name in order_of(described))))
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "written_by": f"mpitrain {__version__}",
        "part": name,
        "checkpoint_at": position_of(folder),
        "run": identity.run,
        "attempt": identity.attempt,
        "resumed_from": identity.resumed_from,
        "parts": list(parts),
        "about": about if name == FIRST_PART else None,  # which nobody else needs to repeat
        "num_bytes": num_bytes,
        "sha256": payload.digest.hexdigest(),
        "state": structure,
    }
    num_text_bytes = len(_text(record))
    try:
        if num_text_bytes > MAX_RECORD_BYTES or num_bytes > MAX_PART_BYTES:
            raise OSError(errno.EFBIG, f"{num_text_bytes} bytes of JSON, {num_bytes} of tensors")
        run_dir, place = folder.parent.parent, place_of(folder, name)
        make_private(run_dir, *place.relative_to(run_dir).parts)
        with all_durably_replaced(place / f"{name}.safetensors", place / f"{name}.json") as temporaries:
            _write(temporaries[0], payload, num_bytes // 2 if disk_full else None)
            record["sha256"] = payload.digest.hexdigest()
            _write(temporaries[1], [_text(record)])
    except OSError as error:
        raise CheckpointError(
            f"cannot write checkpoint part {folder / name}: {error.strerror or error}; the checkpoints before it are "
            "untouched"
        ) from error
    return num_bytes + num_text_bytes


class _Digested:
    """Pieces of a file, with the digest of those that have been taken."""

    def __init__(self, pieces: Iterable[bytes | memoryview]):
        self._pieces, self.digest = pieces, hashlib.sha256()

    def __iter__(self) -> Iterator[bytes | memoryview]:
        for piece in self._pieces:
            self.digest.update(piece)
            yield piece


def _text(record: dict[str, Any]) -> bytes:
    return json.dumps(record | {"self": _digest(record)}).encode()


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def corrupt_part(folder: Path, name: str) -> None:
    """Flip a bit in the middle of its tensors, as ordered by `--inject`."""
    path = found_at(folder, name) / f"{name}.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _write(path: Path, pieces: Iterable[bytes | memoryview], room: int | None = None) -> None:
    """`room`: bytes after which the disk is full."""
    with open(path, "wb") as file:
        for piece in pieces:
            file.write(piece if room is None else piece[: max(0, room - file.tell())])
        if room is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _read_record(folder: Path, name: str) -> dict[str, Any]:
    """A part's JSON, which belongs to this folder and name."""
    path = found_at(folder, name) / f"{name}.json"
    try:
        record = json.loads(read_bounded(path, MAX_RECORD_BYTES))
        said = record.pop("self")
        digest = _digest(record)
    except FileNotFoundError as error:
        raise UnfinishedError(f"{path} was never finished") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} is damaged: nested too deep") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if said != digest:
        raise CheckpointError(f"{path} is damaged: its checksum does not match")
    if record.get("schema") != SCHEMA:
        raise OtherSchemaError(
            f"{path} was written by {record.get('written_by', 'an older mpitrain')!s:.80}, whose checkpoints have "
            f"schema {record.get('schema')!r}, and this mpitrain {__version__} reads schema {SCHEMA}: go on with the "
            "version that wrote it, or begin anew without --resume"
        )
    _check_record(path, record, position_of(folder), name)
    return dict(record)


def _check_record(path: Path, record: dict[str, Any], checkpoint_at: int | None, name: str) -> None:
    for key, kind in _FIELDS.items():
        if key not in record or not isinstance(record[key], kind) or isinstance(record[key], bool):
            raise CheckpointError(f"{path} is damaged: it has no {key!r}, or one of a wrong type")
    _check_source(path, record["resumed_from"])
    for key, here in (("part", name), ("checkpoint_at", checkpoint_at)):
        if record[key] != here:
            raise CheckpointError(f"{path} does not belong there: its {key} is {record[key]!r}, not {here!r}")
    for key in ("run", "attempt"):
        if not is_id(record[key]):
            raise CheckpointError(f"{path} is damaged: {record[key]!r:.80} is no id of a {key}")
    for part in record["parts"]:
        if not isinstance(part, str) or not PART_NAME.fullmatch(part):
            raise CheckpointError(f"{path} is damaged: {part!r:.80} is no name of a part")


def _check_source(path: Path, source: dict[str, Any] | None) -> None:
    """From which checkpoint the run began that has written the part."""
    if source is None:
        return
    at = source.get("checkpoint_at")
    counts = [at, source.get("samples", at)]  # earlier versions have kept the name alone
    ids = is_id(source.get("run")) and is_id(source.get("attempt"))
    if not ids or not all(type(count) is int and count >= 0 for count in counts):
        raise CheckpointError(f"{path} is damaged: {source!r:.80} is no checkpoint that a run can go on from")


def _size(path: Path, handle: int, record: dict[str, Any]) -> int:
    size, wanted = os.fstat(handle).st_size, record["num_bytes"]
    if size != wanted or size > MAX_PART_BYTES:
        raise CheckpointError(f"{path} is damaged: {size} bytes instead of {wanted}")
    return size


@contextlib.contextmanager
def _payload(folder: Path, name: str) -> Iterator[tuple[Path, Any]]:
    path = found_at(folder, name) / f"{name}.safetensors"
    try:
        with open_regular(path) as file:
            yield path, file
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _check_payload(folder: Path, name: str, record: dict[str, Any]) -> None:
    """Its checksum, a piece at a time."""
    with _payload(folder, name) as (path, file):
        _size(path, file.fileno(), record)
        digest = hashlib.sha256()
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
        if digest.hexdigest() != record["sha256"]:
            raise CheckpointError(f"{path} is damaged: its checksum does not match")


def read_part(folder: Path, name: str, identity: Identity | None = None) -> Any:
    """The state of one part, verified; `identity`: whose checkpoint it must be.

    Raises:
        CheckpointError: not there, damaged, of another name, checkpoint, run, attempt or schema, or larger than this
            machine's memory.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    from mpitrain.checkpoint.state_tree import join

    record = _read_record(folder, name)
    if identity is not None:
        _check_identity(folder, name, record, identity)
    with _payload(folder, name) as (path, file):
        size, memory = (
            _size(path, file.fileno(), record),
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        )
        if size > memory:
            raise CheckpointError(f"{path} has {size} bytes, and this machine {memory} of memory")
        payload = file.read(size + 1)
        if len(payload) != size or hashlib.sha256(payload).hexdigest() != record["sha256"]:
            raise CheckpointError(f"{path} is damaged: its checksum does not match")
    try:
        tensors = load(payload)
        del payload  # which is as large
        return _as_dict(join(record["state"], tensors))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder / name} cannot be read: {type(error).__name__}: {error!s:.200}"
        ) from error


def _as_dict(state: object) -> dict[Any, Any]:
    if not isinstance(state, dict):
        raise TypeError(f"its state is a {type(state).__name__}")
    return state


class _NoTensors(dict[str, Any]):
    def __missing__(self, name: str) -> None:
        return None


def read_numbers(folder: Path, name: str, key: str, identity: Identity) -> Any:
    """What a part of the run and attempt `identity` holds under `key`, without its tensors, which stay on disk.

    Raises:
        CheckpointError: not there, damaged, of another schema, or not of that start.
    """
    from mpitrain.checkpoint.state_tree import join

    record = _read_record(folder, name)
    _check_identity(folder, name, record, identity)
    try:
        return _as_dict(_as_dict(join(record["state"], _NoTensors()))[key])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{folder / name} cannot be read: {type(error).__name__}: {error!s:.200}"
        ) from error


def _check_identity(folder: Path, name: str, record: dict[str, Any], identity: Identity) -> None:
    path = found_at(folder, name) / f"{name}.json"
    if record["run"] != identity.run:
        raise CheckpointError(
            f"{path} does not belong there: it is of run {record['run']!r}, not {identity.run!r}"
        )
    if record["attempt"] != identity.attempt:
        raise UnfinishedError(
            f"{path} was never finished in the attempt that wrote {FIRST}: it is an earlier or later one's"
        )


def survey(folder: Path) -> Checkpoint:
    """A checkpoint whose parts are all there and belong together; their tensors are not looked at (`damage`).

    Raises:
        CheckpointError: what is missing, damaged or of something else.
    """
    first = _read_record(folder, FIRST)
    identity = Identity(first["run"], first["attempt"], first["resumed_from"])
    parts = tuple(first["parts"])
    if FIRST not in parts or len(set(parts)) < len(parts):
        raise CheckpointError(f"{folder / FIRST}.json is damaged: {parts!r:.200} are not all parts")
    for name in parts[:]:
        if name != FIRST:
            _check_identity(folder, name, _read_record(folder, name), identity)
    return Checkpoint(folder, position_of(folder) or 0, parts, first["about"] or {}, identity)


def damage(folder: Path, parts: Sequence[str]) -> list[str]:
    """What is wrong with the tensors of these parts."""
    found = []
    for name in parts:
        try:
            _check_payload(folder, name, _read_record(folder, name))
        except CheckpointError as error:
            found.append(str(error))
    return found


def verify(folder: Path) -> Checkpoint:
    """A complete checkpoint, of which everything verifies.

    Raises:
        CheckpointError: what is missing, damaged or of something else.
    """
    found = survey(folder)
    if damaged := damage(folder, found.parts):
        raise CheckpointError(damaged[0])
    return found


def candidates(run_dir: Path, refused: list[CheckpointError]) -> Iterator[Checkpoint]:
    """Checkpoints whose parts are there and belong together, the newest first; why those between them are none is
    added to `refused`.

    Raises:
        OtherSchemaError: the next one is of another version.
    """
    for folder in listed(run_dir):
        try:
            found = survey(folder)
        except OtherSchemaError:
            raise
        except CheckpointError as error:
            refused.append(error)
            continue
        yield found


def nothing_verifies(run_dir: Path, refused: Sequence[CheckpointError]) -> None:
    """Raise where there are checkpoints and none is whole, unless none was ever finished.

    Raises:
        CheckpointError: with every reason.
    """
    if not all(isinstance(error, UnfinishedError) for error in refused):
        reasons = "; ".join(map(str, refused))
        raise CheckpointError(f"no checkpoint under {run_dir / FOLDER} verifies: {reasons}")


def newest(run_dir: Path) -> Checkpoint | None:
    """The newest checkpoint that verifies, or None where none was ever finished.

    Raises:
        CheckpointError: there are checkpoints, and none of them verifies.
        OtherSchemaError: the newest one that may be whole is of another version.
    """
    refused: list[CheckpointError] = []
    for found in candidates(run_dir, refused):
        damaged = damage(found.folder, found.parts)
        if not damaged:
            return found._replace(refused=tuple(map(str, refused)))
        refused += map(CheckpointError, damaged)
    nothing_verifies(run_dir, refused)
    return None
