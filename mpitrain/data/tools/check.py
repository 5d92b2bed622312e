"""`mpitrain data check`: is every shard what was packed, are its values finite, and will reading it be fast.

Invariants: it reads every chunk as a job would, goes on after each problem, and names shard, dataset, chunk
and sample. A problem would stop a job; an advice is about what would only make it slow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpitrain.data.format.catalogue import OFFSETS, ArraySpec, Catalogue, ShardInfo
from mpitrain.data.format.columns import Array
from mpitrain.data.format.layout import PACK_AGAIN, cache_bytes_needed, describe_shard, open_shard
from mpitrain.data.format.manifest import NAME, Manifest, file_sha256, specs_to_json
from mpitrain.data.read.shard_files import ShardFiles
from mpitrain.data.write.ranks import ALONE, Ranks
from mpitrain.errors import DataError
from mpitrain.system.files.outside import CAREFUL, Trust, at_home, check_inside, check_size, find_files

CHUNK_RANGE = (
    256 << 10,
    16 << 20,
)  # bytes: below, a read costs more than its bytes; above, a window takes gigabytes
WINDOW_CHUNKS = 8  # what `Shards` mixes by default
MAX_PROBLEMS = 20  # of one shard


@dataclass(frozen=True)
class Findings:
    """What a check has found: whether there is an index, shards and samples looked at, problems, and advice, one
    sentence each."""

    indexed: bool
    num_shards: int
    num_samples: int
    problems: tuple[str, ...]
    advice: tuple[str, ...]


def check(
    target: str,
    num_workers: int | None = None,
    ranks: Ranks = ALONE,
    progress: Callable[[int, int | None], None] = lambda *_: None,
    trust: Trust = CAREFUL,
) -> Findings:
    """Check a pack or files; under several ranks all of them call it, and each reads a part.

    Args:
        target: a folder that `data pack` wrote, or a pattern of any HDF5 files.
        num_workers: how many workers will read them.
        trust: what the files may do.
    Raises:
        DataError: there is no pack, or an unfinished one, or no file.
    """
    manifest: Manifest | None = None
    paths: list[str] = []
    error = None
    try:
        manifest, paths = _files(target, trust)
    except Exception as failure:
        error = failure
    ranks.agree(error)
    problems: list[str] = []
    found: list[tuple[ShardInfo, dict[str, ArraySpec]] | None] = []
    for number, path in enumerate(paths):
        mine = number % ranks.size == ranks.rank
        described = _describe(path, manifest, problems if mine else [], trust)
        found.append(described)
        if mine and described:
            problems += _contents(*described, trust)
        progress(number + 1, len(paths))
    every_problem = [problem for each in ranks.allgather(problems) for problem in each]
    whole = [described for described in found if described]
    every_problem += [] if manifest else list(_differing(whole))
    infos = tuple(info for info, _ in whole)
    advice: tuple[str, ...] = ()
    if infos and not every_problem:
        advice = tuple(_advice(Catalogue(infos, whole[0][1], WINDOW_CHUNKS), num_workers))
    return Findings(
        manifest is not None,
        len(paths),
        sum(info.num_samples for info in infos),
        tuple(every_problem),
        advice,
    )


def _files(target: str, trust: Trust) -> tuple[Manifest | None, list[str]]:
    folder = at_home(target)
    if not folder.is_dir():
        files = find_files(target)
        if not files.paths:
            raise DataError(f"{target}: no such folder or file; give a pack, or a pattern in quotes")
        files.check_inside(trust.allow_external)
        return None, [os.path.abspath(path) for path in files.paths]
    manifest = Manifest.read(folder, trust.allow_external)
    if manifest is None or not manifest.complete:
        state = "no pack" if manifest is None else "an unfinished pack"
        raise DataError(f"{folder}: {state}; make one with `mpitrain data pack SOURCE {folder}`")
    paths = [str(folder / name) for name in manifest.files]
    check_inside(folder, paths, trust.allow_external)
    return manifest, paths


def _describe(
    path: str, manifest: Manifest | None, problems: list[str], trust: Trust
) -> tuple[ShardInfo, dict[str, ArraySpec]] | None:
    """What a shard says of itself, compared with the index."""
    if not os.path.exists(path):
        problems.append(f"{path}: shard is missing; {PACK_AGAIN}")
        return None
    name = os.path.basename(path)
    try:
        if manifest and (expected := manifest.sha256.get(name)) and file_sha256(Path(path)) != expected:
            problem = f"its SHA-256 is not the one that {NAME} keeps: it has changed since it was packed"
            problems.append(f"{path}: {problem}; {PACK_AGAIN}")
        info, specs = describe_shard(path, (), trust)
    except OSError as error:
        problems.append(f"{path}: cannot be read ({error.strerror})")
        return None
    except DataError as error:
        problems.append(str(error))
        return None
    if manifest and info.num_samples != manifest.files[name]:
        problems.append(f"{path}: has {info.num_samples} samples, {NAME} says {manifest.files[name]}")
    if manifest and manifest.arrays and specs_to_json(specs) != manifest.arrays:
        problems.append(f"{path}: has the arrays {_listed(specs)}, which are not those that {NAME} lists")
    return info, specs


def _listed(specs: dict[str, ArraySpec]) -> str:
    return ", ".join(f"{name} {spec}" for name, spec in specs.items())


def _differing(whole: list[tuple[ShardInfo, dict[str, ArraySpec]]]) -> Iterator[str]:
    for info, specs in whole[1:]:
        if specs != whole[0][1]:
            yield f"{info.path}: has the arrays {_listed(specs)}, {whole[0][0].path} has {_listed(whole[0][1])}"


def _contents(info: ShardInfo, specs: dict[str, ArraySpec], trust: Trust) -> Iterator[str]:
    """Read a shard's chunks; what is damaged or not finite in them."""
    catalogue = Catalogue((info,), specs, 1)
    try:
        check_size(f"{info.path}: a chunk", catalogue.chunk_bytes, trust.max_gib)
    except DataError as error:
        yield str(error)
        return
    into: dict[str, Array] = {}
    for name, spec in specs.items():
        rows = catalogue.chunk_entries[name] if spec.variable else info.chunk_samples
        into[name] = np.empty((rows, *spec.shape), spec.dtype)
        if spec.variable:
            into[name + OFFSETS] = np.empty((info.chunk_samples, 2), np.int64)
    files, num_found = ShardFiles(catalogue, trust), 0
    try:
        for chunk in range(info.num_chunks):
            try:
                files.read(chunk, into)
            except DataError as error:
                found = [str(error)]
            else:
                first = chunk * info.chunk_samples
                rows = min(info.chunk_samples, info.num_samples - first)
                found = [
                    f"{info.path}: dataset {name!r}, chunk {chunk}, sample {first + sample} holds {value}"
                    for name, spec in specs.items()
                    if (bad := _not_finite(name, spec, into, rows))
                    for sample, value in [bad]
                ]
            yield from found
            num_found += len(found)
            if num_found >= MAX_PROBLEMS:
                yield f"{info.path}: more may be wrong; stopped after {num_found} problems"
                return
    finally:
        files.close()


def _not_finite(name: str, spec: ArraySpec, into: dict[str, Array], rows: int) -> tuple[int, str] | None:
    """(sample in its chunk, value) of the first value that is not finite."""
    if np.dtype(spec.dtype).kind not in "fc":
        return None
    spans = into[name + OFFSETS][:rows] if spec.variable else None
    values = into[name][: rows if spans is None else int(spans[-1, 1])]
    bad = ~np.isfinite(values)
    if not bad.any():
        return None
    where = np.argwhere(bad)[0]
    row = int(where[0])
    sample = row if spans is None else int(np.searchsorted(spans[:, 1], row, side="right"))
    return sample, str(values[tuple(where)])


def _advice(catalogue: Catalogue, num_workers: int | None) -> Iterator[str]:
    low, high = CHUNK_RANGE
    size, first = catalogue.chunk_bytes, catalogue.files[0]
    stated = f"between {low >> 10} KiB and {high >> 20} MiB"
    if size > high:
        yield f"chunks of {size / 2**20:.1f} MiB make windows large; {stated} is good: --chunk-samples"
    elif size < low and catalogue.num_chunks > len(catalogue.files):
        yield f"chunks of {size / 1024:.1f} KiB cost more than their bytes; {stated} is good: --chunk-samples"
    with open_shard(first.path) as file:
        fixed = {name: file[name] for name, spec in catalogue.arrays.items() if not spec.variable}
        for name, dataset in fixed.items():
            chunks = dataset.chunks
            if chunks is None:
                yield f"dataset {name!r} is not chunked: it has no checksums and cannot be compressed; pack it"
            elif chunks[1:] != dataset.shape[1:]:
                yield (
                    f"dataset {name!r} has chunks {chunks}, which cut its samples {dataset.shape[1:]}: each sample"
                    " takes several reads; pack it"
                )
        if needed := cache_bytes_needed(fixed, first.chunk_samples):
            yield (
                f"chunks of the arrays do not line up: reading takes {needed / 2**20:.1f} MiB of HDF5's own chunk"
                " cache an array; pack them together"
            )
    small = [file for file in catalogue.files if file.num_samples < file.chunk_samples]
    if len(small) > 1:
        yield f"{len(small)} shards hold less than one chunk; pack them together"
    if num_workers is not None:
        yield from _for_workers(catalogue, num_workers)


def _for_workers(catalogue: Catalogue, num_workers: int) -> Iterator[str]:
    """Each worker should have a window of its own, else neighbours read the same chunks."""
    if catalogue.num_samples < num_workers:
        yield f"{catalogue.num_samples} samples are fewer than {num_workers} workers: a job would refuse to start"
    elif catalogue.num_chunks < num_workers * catalogue.window_chunks:
        have, want = catalogue.num_chunks, num_workers * catalogue.window_chunks
        yield (
            f"{have} chunks are fewer than {want} = {num_workers} workers x {catalogue.window_chunks} chunks a window:"
            " workers read the same chunks; pack with a smaller --chunk-samples, or give Shards a smaller"
            " window_chunks"
        )
