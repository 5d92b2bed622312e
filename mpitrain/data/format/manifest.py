"""`mpitrain-pack.json` beside packed shards, the index: which files belong together, and is the pack finished.

It is written before the first shard with `complete: false`, and after the last one with `complete: true`. So a
pack that was killed at any moment is recognised, by a second `pack` (which goes on) and by a job (which refuses
to train on half the data).

Invariants: only files that bear the name of one of the pack's shards are ever touched; nothing else in
the directory is removed or believed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mpitrain.data.format.catalogue import ArraySpec
from mpitrain.errors import DataError, UsageError
from mpitrain.system.files.atomic import partial_of, replacing, sync_directory, write_all
from mpitrain.system.files.outside import at_home, check_inside, choose_names, open_regular, read_json

NAME = "mpitrain-pack.json"
SCHEMA = 2  # 1 had neither arrays nor splits
SPLITS = ("validate", "train")


@dataclass(frozen=True)
class Manifest:
    """What went into a pack (`recipe`: source, digest, options) and came out.

    `files`: name -> samples. When it is complete, `sha256`: name -> hexadecimal SHA-256 of the file, and `arrays`:
    name -> shape, dtype and whether it is variable. `splits`: what the files' names begin with; while the pack is
    not complete, every file of such a name is its own.
    """

    recipe: dict[str, Any]
    files: dict[str, int]
    complete: bool = False
    schema: int = SCHEMA
    sha256: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, dict[str, Any]] = field(default_factory=dict)
    splits: list[str] = field(default_factory=lambda: list(SPLITS))

    def write(self, directory: Path) -> None:
        """Replace the directory's manifest by this one in one step."""
        with replacing(directory / NAME) as file:
            write_all(file, json.dumps(asdict(self), indent=1, sort_keys=True).encode() + b"\n")

    @classmethod
    def read(cls, directory: Path, allow_external: bool = False) -> Manifest | None:
        """The directory's manifest, None without one.

        Raises:
            DataError: it is not what `write` wrote, or a link out of the directory that is not allowed.
        """
        path = directory / NAME
        try:
            if path.is_symlink():
                check_inside(directory, [path], allow_external)
            fields = read_json(path)
            if (
                isinstance(fields, dict)
                and isinstance(fields.get("schema"), int)
                and fields["schema"] > SCHEMA
            ):
                found = f"has index schema {fields['schema']}, this mpitrain reads up to {SCHEMA}"
                raise DataError(f"{path}: {found}; update mpitrain")
            _check_fields(fields)
            return cls(**fields)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}); change its permissions") from error
        except (ValueError, TypeError) as error:
            if isinstance(error, DataError):
                raise
            way_out = "remove it together with the shards beside it and pack again"
            raise DataError(
                f"{path}: is not a manifest of `mpitrain data pack` ({error}); {way_out}"
            ) from error

    def owns(self, name: str) -> bool:
        """Whether a file of this name is one of the pack's shards, there already or still to come."""
        return name in self.files or (not self.complete and _is_shard_name(name, self.splits))

    def leftovers(self, directory: Path) -> Iterator[Path]:
        """The pack's files in its directory, temporary ones too, without the manifest."""
        for path in sorted(directory.iterdir()):
            name = path.name.lstrip(".").removesuffix(".partial").removesuffix(RECEIPT)
            if self.owns(name) or path == partial_of(directory / NAME):
                yield path

    def clean(self, directory: Path) -> None:
        """Remove what a finished pack needs no more: receipts, and what killed processes left."""
        for path in self.leftovers(directory):
            if path.name.startswith("."):
                path.unlink(missing_ok=True)

    def remove(self, directory: Path) -> None:
        """Remove the pack: its shards first, what says that they belong to it last.

        Raises:
            DataError: the system refuses.
        """
        try:
            for path in self.leftovers(directory):
                path.unlink(missing_ok=True)
            (directory / NAME).unlink(missing_ok=True)
            sync_directory(directory)
        except OSError as error:
            raise DataError(
                f"{directory}: an unfinished pack cannot be removed ({error.strerror}); remove it by hand"
            ) from error


RECEIPT = ".done"  # `.train-00000.h5.done`: that shard is whole, while the pack is not


def _check_fields(fields: object) -> None:
    """Refuse what `write` never writes; above all names of files that are not shards of this very directory.

    Raises:
        ValueError: says what.
    """
    expected = {
        "recipe": dict,
        "files": dict,
        "complete": bool,
        "schema": int,
        "sha256": dict,
        "arrays": dict,
    }
    expected["splits"] = list
    if not isinstance(fields, dict) or not {"recipe", "files"} <= set(fields) <= set(expected):
        raise ValueError("other fields than an index has")
    for key, value in fields.items():
        if not isinstance(value, expected[key]):
            raise ValueError(f"{key!r} is {type(value).__name__}, expected {expected[key].__name__}")
    for name, samples in fields["files"].items():
        split = name.rpartition("-")[0]
        if not split.isidentifier() or not _is_shard_name(name, [split]):
            raise ValueError(f"{name[:200]!r} is no plain name of a shard, such as train-00000.h5")
        if type(samples) is not int or samples < 0:
            raise ValueError(f"{name} has, by the index, {str(samples)[:40]!r} samples")
    for name, digest in fields.get("sha256", {}).items():
        if name not in fields["files"] or not re.fullmatch("[0-9a-f]{64}", str(digest)):
            raise ValueError(f"{str(digest)[:80]!r} is no SHA-256 of a shard")
    for split in fields.get("splits", []):
        if not isinstance(split, str) or not split.isidentifier():
            raise ValueError(f"{str(split)[:200]!r} is no plain name of a split")


def _is_shard_name(name: str, splits: Sequence[str]) -> bool:
    split, _, number = name.rpartition("-")
    return split in splits and re.fullmatch(r"[0-9]{5,}\.h5", number) is not None


def shard_name(split: str, number: int) -> str:
    """Name of a split's shard, from 0."""
    return f"{split}-{number:05d}.h5"


def specs_to_json(arrays: Mapping[str, ArraySpec]) -> dict[str, dict[str, Any]]:
    """Array specs as the manifest holds them."""
    return {name: {**asdict(spec), "shape": list(spec.shape)} for name, spec in arrays.items()}


def make_room(directory: Path, splits: Sequence[str] = SPLITS) -> Manifest | None:
    """Make `directory` where there is none; returns the manifest of what is there, None for nothing.

    Raises:
        UsageError: it holds shards that no pack wrote, or cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        there = sorted(path.name for path in directory.iterdir())
    except OSError as error:
        raise UsageError(
            f"{directory}: cannot be made a directory ({error.strerror}); choose another one"
        ) from error
    old = Manifest.read(directory)
    foreign = [name for name in there if _is_shard_name(name, splits) and not (old and old.owns(name))]
    if foreign:
        raise UsageError(f"{directory}: holds {foreign[0]}, which no pack wrote; choose an empty directory")
    return old


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_against_manifest(pattern: str, found: Sequence[str], allow_external: bool = False) -> None:
    """Refuse unfinished packs and packs of which a matching shard has gone.

    Args:
        pattern: the glob pattern; found: absolute paths that match it; allow_external: an index that is a link
            out of its folder.
    Raises:
        DataError: names the directory or the missing shard.
    """
    beside = os.path.dirname(os.path.abspath(at_home(pattern)))
    last = os.path.basename(pattern)
    for directory in sorted({beside, *(os.path.dirname(path) for path in found)}):
        manifest = Manifest.read(Path(directory), allow_external)
        if manifest is None:
            continue
        there = [os.path.basename(path) for path in found if os.path.dirname(path) == directory]
        wanted = choose_names(last, [*manifest.files, *there])
        wanted = [name for name in dict.fromkeys(wanted) if name in manifest.files]
        if not manifest.complete and (wanted or any(manifest.owns(name) for name in there)):
            raise DataError(
                f"{directory}: its pack was interrupted half-way; run `mpitrain data pack` once more"
            )
        missing = [name for name in wanted if os.path.join(directory, name) not in found]
        if missing:
            raise DataError(
                f"{os.path.join(directory, missing[0])}: shard is missing ({len(missing)} of {len(wanted)}"
                f" that {NAME} lists for {pattern!r}); copy it again or run `mpitrain data pack` once more"
            )


def counted_in_packs(paths: Sequence[str], allow_external: bool = False) -> dict[str, int]:
    """Samples of those of these absolute paths that are shards of finished packs, by the packs' indexes.

    Raises:
        DataError: as `Manifest.read`.
    """
    counted: dict[str, int] = {}
    for directory in sorted({os.path.dirname(path) for path in paths}):
        manifest = Manifest.read(Path(directory), allow_external)
        if manifest is not None and manifest.complete:
            counted |= {os.path.join(directory, name): count for name, count in manifest.files.items()}
    return counted
