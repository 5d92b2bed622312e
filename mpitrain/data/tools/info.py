"""`mpitrain data info`: what shards hold, how they are stored, and what reading them takes, as lines of text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mpitrain.data.format.catalogue import OFFSETS, ArraySpec, Catalogue
from mpitrain.data.format.filters import filters_of
from mpitrain.data.format.layout import open_shard
from mpitrain.data.format.manifest import Manifest
from mpitrain.data.preflight import look
from mpitrain.data.read.chunk_cache import slots_for
from mpitrain.data.read.shards import Shards
from mpitrain.system.files.outside import CAREFUL, Trust, at_home

MAX_FILES = 20


def info(pattern: str, trust: Trust = CAREFUL) -> Iterator[str]:
    """Lines about the shards that match, or that a folder holds.

    Raises:
        DataError: what `Shards.scan` says is wrong with them.
    """
    if at_home(pattern).is_dir():
        pattern = os.path.join(pattern, "*.h5")
    shards = Shards(pattern, allow_external=trust.allow_external, max_gib=trust.max_gib)
    catalogue = shards.scan()
    sizes = [os.path.getsize(file.path) for file in catalogue.files]
    for file, size in list(zip(catalogue.files, sizes))[:MAX_FILES]:
        yield f"{file.path}: {file.num_samples} samples, {file.chunk_samples} to a chunk, {size / 2**20:.1f} MiB"
    if len(sizes) > MAX_FILES:
        yield f"... and {len(sizes) - MAX_FILES} more"
    for name, spec in catalogue.arrays.items():
        yield _array(catalogue, name, spec)
    total = catalogue.num_samples * catalogue.sample_bytes
    about = "at most " if any(spec.variable for spec in catalogue.arrays.values()) else ""
    yield (
        f"total: {catalogue.num_samples} samples, {about}{total / 2**20:.1f} MiB decoded,"
        f" {sum(sizes) / 2**20:.1f} MiB on disk"
    )
    memory = slots_for(catalogue) * catalogue.chunk_bytes
    yield (
        f"reading: chunks of {catalogue.chunk_bytes / 2**20:.2f} MiB; windows of {catalogue.window_chunks} of them mix"
        f" about {catalogue.window_samples} samples and take up to {memory / 2**20:.1f} MiB"
    )
    seen = look(shards, catalogue)
    yield f"values: {seen.summary()}"
    yield from (f"  {line}" for line in seen.lines())
    yield from (f"warning: {line}" for line in seen.warnings())
    for folder in sorted({os.path.dirname(file.path) for file in catalogue.files}):
        if manifest := Manifest.read(Path(folder), trust.allow_external):
            yield f"index: {folder}: {_recipe(manifest)}"


def _array(catalogue: Catalogue, name: str, spec: ArraySpec) -> str:
    if spec.variable:
        size = f"{spec.sample_bytes} bytes an entry, up to {catalogue.chunk_entries[name]} entries a chunk"
    else:
        size = f"{spec.sample_bytes} bytes a sample"
    with open_shard(catalogue.files[0].path) as file:
        stored = ", ".join(filters_of(file[name])) or "no filters: no checksums"
        if spec.variable:
            stored += f"; offsets in {name + OFFSETS}"
    return f"array {name}: {spec}, {size} ({stored})"


def _recipe(manifest: Manifest) -> str:
    facts = {
        key: value
        for key, value in manifest.recipe.items()
        if key not in ("digest", "classes", "shard_schema")
    }
    classes = manifest.recipe.get("classes")
    facts |= {"classes": len(classes)} if isinstance(classes, list) else {}
    return ", ".join(f"{key} {value}" for key, value in facts.items())
