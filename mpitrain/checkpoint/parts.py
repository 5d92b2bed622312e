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
import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
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
        held: parts that this process has read while it verified them, until somebody asks for their states.
    """

    folder: Path
    checkpoint_at: int
    parts: tuple[str, ...]
    about: dict[str, Any]
    identity: Identity
    refused: tuple[str, ...] = ()
    held: dict[str, Part] | None = None

    def part(self, name: str) -> Any:
        """The state of one part, or None where the checkpoint has none of that name. What is held is handed over, so it
        is read anew for whoever asks for it again."""
        if name not in self.parts:
            return None
        held = self.held.pop(name, None) if self.held else None
        return read_part(self.folder, name, self.identity) if held is None else held.state()

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
    between: Callable[[], object] | None = None,
) -> int:
    """Write one part; returns its bytes. `parts`, `about`: all of the checkpoint's, and what the run is (its first part
    knows). `disk_full`: fail half-way, as ordered by `--inject`. `between`: is called between pieces of some megabytes.

    Raises:
        CheckpointError: the disk is full or not writable; nothing half-written stays.
        TypeError: the state holds what a checkpoint cannot.
    """
    from mpitrain.checkpoint.payload import Payload
    from mpitrain.checkpoint.state_tree import split

    structure, tensors = split(state)
    payload = Payload(tensors)
    num_bytes = payload.num_bytes
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
            payload.write(temporaries[0], num_bytes // 2 if disk_full else None, between)
            record["sha256"] = payload.digest.hexdigest()
            temporaries[1].write_bytes(_text(record))
    except OSError as error:
        raise CheckpointError(
            f"cannot write checkpoint part {folder / name}: {error.strerror or error}; the checkpoints before it are "
            "untouched"
        ) from error
    return num_bytes + num_text_bytes


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


@contextlib.contextmanager
def _payload(folder: Path, name: str, record: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """The file of its tensors, which has the right size."""
    path = found_at(folder, name) / f"{name}.safetensors"
    try:
        with open_regular(path) as file:
            size, wanted = os.fstat(file.fileno()).st_size, record["num_bytes"]
            if size != wanted or size > MAX_PART_BYTES:
                raise CheckpointError(f"{path} is damaged: {size} bytes instead of {wanted}")
            yield path, file
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _compare_digest(path: Path, digest: str, record: dict[str, Any]) -> None:
    if digest != record["sha256"]:
        raise CheckpointError(f"{path} is damaged: its checksum does not match")


def _check_payload(folder: Path, name: str) -> None:
    """Whether its tensors are as they were written; none is kept."""
    from mpitrain.checkpoint.payload import digest_of

    record = _read_record(folder, name)
    with _payload(folder, name, record) as (path, file):
        _compare_digest(path, digest_of(file), record)


class Part(NamedTuple):
    """A part that has been read whole, and verifies: the structure of its state, its tensors by name, and why the file
    holds none."""

    place: Path
    structure: Any
    tensors: dict[str, Any]
    why_not: Exception | None

    def state(self) -> dict[Any, Any]:
        """What was written.

        Raises:
            CheckpointError: nobody has written that.
        """
        from mpitrain.checkpoint.state_tree import join

        try:
            if self.why_not is not None:
                raise self.why_not
            return _as_dict(join(self.structure, self.tensors))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, RuntimeError) as error:
            raise _unreadable(self.place, error) from error


def load_part(folder: Path, name: str, identity: Identity | None = None) -> Part:
    """One part, read once and verified on the way; `identity`: whose checkpoint it must be.

    Raises:
        CheckpointError: not there, damaged, of another name, checkpoint, run, attempt or schema, or larger than this
            machine's memory.
    """
    from mpitrain.checkpoint.payload import read

    record = _read_record(folder, name)
    if identity is not None:
        _check_identity(folder, name, record, identity)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with _payload(folder, name, record) as (path, file):
        if record["num_bytes"] > memory:
            raise CheckpointError(
                f"{path} has {record['num_bytes']} bytes, and this machine {memory} of memory"
            )
        digest, tensors, why_not = read(file, record["num_bytes"])
        _compare_digest(path, digest, record)
    return Part(folder / name, record["state"], tensors, why_not)


def read_part(folder: Path, name: str, identity: Identity | None = None) -> Any:
    """The state of one part, verified; arguments and errors as of `load_part`, and one of a state that nobody has
    written."""
    return load_part(folder, name, identity).state()


def _unreadable(place: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{place} cannot be read: {type(error).__name__}: {error!s:.200}")


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
        raise _unreadable(folder / name, error) from error


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


def damage(found: Checkpoint, parts: Sequence[str], keep: Collection[str] = ()) -> list[str]:
    """What is wrong with the tensors of these parts; those to `keep` are in `found.held` then."""
    told = []
    for name in parts:
        try:
            if name in keep:
                assert found.held is not None, "who keeps parts has found the checkpoint for itself"
                found.held[name] = load_part(found.folder, name, found.identity)
            else:
                _check_payload(found.folder, name)
        except CheckpointError as error:
            told.append(str(error))
    return told


def verify(folder: Path) -> Checkpoint:
    """A complete checkpoint, of which everything verifies.

    Raises:
        CheckpointError: what is missing, damaged or of something else.
    """
    found = survey(folder)
    if damaged := damage(found, found.parts):
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
        damaged = damage(found, found.parts)
        if not damaged:
            return found._replace(refused=tuple(map(str, refused)))
        refused += map(CheckpointError, damaged)
    nothing_verifies(run_dir, refused)
    return None
