"""`mpitrain-pack.json` beside packed shards: which files belong together, and is the pack finished.

It is written twice: before the first shard with `complete: false`, and after the last one with `complete:
true`. So a pack that was killed at any moment is recognised, by a second `pack` (which does it again) and by
a job (which refuses to train on half the data).

Law of this file: it names only files that our packing writes; nothing else in the directory is touched or
believed.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mpitrain.data.write import replacing
from mpitrain.errors import DataError

NAME = "mpitrain-pack.json"


@dataclass(frozen=True)
class Manifest:
    """What went into a pack (`recipe`: source, digest, options) and came out (`files`: name -> samples; when it is
    complete `sha256`: name -> hexadecimal SHA-256 of the file)."""

    recipe: dict[str, Any]
    files: dict[str, int]
    complete: bool = False
    schema: int = 1
    sha256: dict[str, str] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Replace the directory's manifest by this one in one step."""
        with replacing(directory / NAME) as file:
            file.write(json.dumps(asdict(self), indent=1, sort_keys=True).encode() + b"\n")

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """The directory's manifest, None without one.

        Raises:
            DataError: it is not what `write` wrote.
        """
        path = directory / NAME
        try:
            return cls(**json.loads(path.read_bytes()))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}); change its permissions") from error
        except (ValueError, TypeError) as error:
            way_out = "remove it together with the shards beside it and pack again"
            raise DataError(
                f"{path}: is not a manifest of `mpitrain data pack` ({error}); {way_out}"
            ) from error


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_against_manifest(pattern: str, found: Sequence[str]) -> None:
    """Refuse unfinished packs and packs of which a matching shard has gone.

    Args:
        pattern: the glob pattern; found: absolute paths that match it.
    Raises:
        DataError: names the directory or the missing shard.
    """
    beside = os.path.dirname(os.path.abspath(os.path.expanduser(pattern)))
    for directory in sorted({beside, *(os.path.dirname(path) for path in found)}):
        manifest = Manifest.read(Path(directory))
        if manifest is None:
            continue
        wanted = fnmatch.filter(manifest.files, os.path.basename(pattern))
        if wanted and not manifest.complete:
            raise DataError(
                f"{directory}: its pack was interrupted half-way; run `mpitrain data pack` once more"
            )
        missing = [name for name in wanted if os.path.join(directory, name) not in found]
        if missing:
            raise DataError(
                f"{os.path.join(directory, missing[0])}: shard is missing ({len(missing)} of {len(wanted)}"
                f" that {NAME} lists for {pattern!r}); copy it again or run `mpitrain data pack` once more"
            )
