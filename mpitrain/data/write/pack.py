"""Packing samples into shards: once, whole, the same every time, by as many ranks as there are.

Samples are permuted by the seed, the first `validate` part of them goes into validate-*.h5 and the rest into
train-*.h5. Each rank writes every size-th shard, and rank 0 the index when all are there. The same source and options
give the same bytes, whichever ranks wrote them; so packing again does nothing, and a pack that was interrupted or has
lost a shard is completed: what is there and has its sum is kept.

Invariants: a directory with another pack or with foreign shards is refused, a job reads nothing until the
index is complete, and a failure leaves whole shards from which the same command continues, or nothing.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.format.columns import check_alike
from mpitrain.data.format.filters import Compression
from mpitrain.data.format.manifest import (
    RECEIPT,
    SPLITS,
    Manifest,
    file_sha256,
    make_room,
)
from mpitrain.data.preflight import look_at_columns
from mpitrain.data.read.order import SPLIT, keyed_bits
from mpitrain.data.sources import Source, SourceOptions, Stream, as_source, open_source
from mpitrain.data.sources.noted import Noted
from mpitrain.data.write.plan import PackOptions, Plan
from mpitrain.data.write.ranks import ALONE, Ranks
from mpitrain.data.write.shard_file import ShardFile
from mpitrain.data.write.writer import ShardWriter
from mpitrain.errors import DataError, UsageError
from mpitrain.system.files.atomic import replacing, write_all
from mpitrain.system.files.outside import at_home, read_json

LOOKING_S = 3.0  # for what would end packing late
Say = Callable[[str], None]
Progress = Callable[[int, int | None], None]  # samples done and to do, of this rank


def _warn(line: str) -> None:
    warnings.warn(line, stacklevel=4)


def pack(
    samples: Any,
    directory: str | Path,
    options: PackOptions | None = None,
    *,
    ranks: Ranks = ALONE,
    progress: Progress = lambda *_: None,
    say: Say = _warn,
    tell: Say = lambda _: None,
    **settings: Any,
) -> tuple[Manifest, bool]:
    """Write samples as shards into `directory`; under several ranks all of them call it.

    Args:
        samples: what the command line takes, such as "train-*.tar"; arrays by name, samples on axis 0; a map-style
            dataset, whose samples are dicts or pairs; any iterable of such samples, which keeps its order (each is
            held out with probability `validate`) and is run through by every rank; or a `Source`.
        options: or its fields and those of `SourceOptions` by name:
            `pack("photos", "data/photos", image_size=(224, 224), validate=0.1, compression="gzip")`.
        ranks: who else packs; `mpitrain.mpi.runtime.start()` under MPI.
        progress: called now and then with how far this rank is.
        say: called on rank 0 with each line about what is surprising, left out, turned or lost; without it they are
            warnings. tell: with each line about what the samples are.
    Returns:
        The index, and whether anything was written (False: the same pack was already there).
    Raises:
        DataError: samples that are none, or unlike each other; a full disk. UsageError: the directory holds
            something else.
    """
    directory = at_home(os.fspath(directory))
    try:
        reading = {
            each.name: settings.pop(each.name) for each in fields(SourceOptions) if each.name in settings
        }
        options = options or PackOptions(**settings)
        origin = _open(samples, SourceOptions(**reading))
        plan = Plan.of(origin, options) if isinstance(origin, Source) else None
    except Exception as error:
        ranks.agree(error)
        raise
    ranks.agree(None)
    if plan is not None:
        _look_before(plan, ranks, say, tell)
        found = _pack_source(plan, directory, ranks, progress)
        noted = Noted.merged(ranks.allgather(plan.source.noted.counts))
        for line in noted.lines() if ranks.rank == 0 else ():
            say(line)
        return found
    assert isinstance(origin, Stream)
    return _pack_stream(origin, directory, options, ranks, progress)


def _look_before(plan: Plan, ranks: Ranks, say: Say, tell: Say) -> None:
    """On rank 0: what the samples are about to become, what is left out of them, and what is surprising."""
    error = None
    if ranks.rank == 0:
        try:
            ahead = plan.source.look_ahead(time.monotonic() + LOOKING_S)
            seen = look_at_columns(plan.source, plan.specs)
            tell(f"{plan.source.name}: {seen.summary()}")
            for line in seen.lines():
                tell(f"  {line}")
            for line in (*plan.source.remarks(), *ahead, *seen.warnings()):
                say(line)
        except Exception as failure:
            error = failure
    plan.source.noted.counts.clear()  # of the samples that were looked at, which are read again
    ranks.agree(error)


def _open(samples: object, options: SourceOptions) -> Source | Stream:
    if isinstance(samples, str | os.PathLike):
        origin = open_source(os.fspath(samples), options)
        origin.name = options.source or origin.name
        return origin
    for option in options.given():
        if option != "variable":
            raise UsageError(f"pack: {option} is for files; give what Python holds as it is to be packed")
    return as_source(samples, options.source or "Python", options.variable)


def _pack_source(plan: Plan, directory: Path, ranks: Ranks, progress: Progress) -> tuple[Manifest, bool]:
    found, error = None, None
    if ranks.rank == 0:
        try:
            plan.describe()
            found = _look(directory, plan)
        except Exception as failure:
            error = failure
    ranks.agree(error)
    plan.recipe, complete, known = ranks.broadcast(found)
    mine = list(plan.files)[ranks.rank :: ranks.size]
    kept = dict(_kept(directory, mine, known, plan.key()))
    everywhere = _merged(ranks.allgather(kept))
    if complete and len(everywhere) == len(plan.files):
        return plan.manifest(everywhere, complete=True), False
    if ranks.rank == 0:
        plan.manifest(everywhere, complete=False).write(directory)
    ranks.broadcast(None)  # nobody writes a shard before the index says that they are not all there
    try:
        kept |= _write(plan, directory, [name for name in mine if name not in kept], progress)
    except BaseException as error:
        there = sum((directory / name).is_file() for name in plan.files)
        if ranks.size == 1 and not there:
            plan.manifest({}, complete=False).remove(directory)
        elif isinstance(error, DataError):
            kept_now = f"{there} of {len(plan.files)} shards are whole and stay"
            raise DataError(f"{error}; {kept_now}: the same command goes on from them") from error
        raise
    done = plan.manifest(_merged(ranks.allgather(kept)), complete=True)
    if ranks.rank == 0:
        done.write(directory)
        done.clean(directory)
    ranks.broadcast(None)
    return done, True


def _look(directory: Path, plan: Plan) -> tuple[dict[str, Any], bool, dict[str, str]]:
    """On rank 0: (recipe, whether this very pack is there, sums that its shards should have), with the directory
    ready.

    Raises:
        UsageError: another pack or foreign shards are there.
    """
    old = make_room(directory)
    if old is None:
        return plan.recipe, False, {}
    if (old.recipe, old.files) == (plan.recipe, plan.files):
        return plan.recipe, old.complete, old.sha256
    if old.complete:
        changed = [
            f"{key}={old.recipe.get(key)}"
            for key in sorted({*old.recipe, *plan.recipe})
            if old.recipe.get(key) != plan.recipe.get(key)
        ]
        raise UsageError(
            f"{directory}: holds another pack ({', '.join(changed)}); choose another, or remove this one"
        )
    old.remove(directory)
    return plan.recipe, False, {}


def _kept(directory: Path, names: list[str], known: dict[str, str], key: str) -> Iterator[tuple[str, str]]:
    """(name, sum) of the shards that are there as they were written by this plan."""
    for name in names:
        path, receipt = directory / name, directory / f".{name}{RECEIPT}"
        try:
            kept = read_json(receipt)
            expected = kept["sha256"] if kept["plan"] == key else known.get(name)
        except (OSError, ValueError, KeyError, TypeError):
            expected = known.get(name)
        if expected and path.is_file() and file_sha256(path) == expected:
            yield name, expected


def _write(plan: Plan, directory: Path, names: list[str], progress: Progress) -> dict[str, str]:
    """Write shards one after the other; returns their sums."""
    chunk = plan.options.chunk_samples
    assert chunk is not None
    compression = Compression.parse(plan.options.compression)
    total, done, sums = sum(plan.files[name] for name in names), 0, {}
    for name in names:
        count = plan.files[name]
        with ShardFile(directory / name, chunk, count, compression) as shard:
            for first in range(0, count, chunk):
                piece = plan.source.read(plan.starts[name] + first, min(chunk, count - first))
                check_alike(piece, plan.specs, plan.source.name)
                shard.append(piece)
                progress(done + first, total)
        done += count
        sums[name] = file_sha256(directory / name)
        with replacing(directory / f".{name}{RECEIPT}") as receipt:
            write_all(receipt, json.dumps({"plan": plan.key(), "sha256": sums[name]}).encode())
        progress(done, total)
    return sums


def _merged(parts: list[dict[str, str]]) -> dict[str, str]:
    merged = {name: value for part in parts for name, value in part.items()}
    return dict(sorted(merged.items()))


def _pack_stream(
    stream: Stream, directory: Path, options: PackOptions, ranks: Ranks, progress: Progress
) -> tuple[Manifest, bool]:
    """Samples in the order they come; which are held out depends on the seed and their number alone."""
    bits, bound = keyed_bits(options.seed, SPLIT), np.uint64(options.validate * 2.0**64)
    writer = ShardWriter(
        directory,
        shard_samples=options.shard_samples,
        chunk_samples=options.chunk_samples,
        compression=options.compression,
        about={"source": stream.name, "seed": options.seed, "validate": options.validate},
        ranks=ranks,
    )
    with writer:
        for first, columns in stream.batches():
            held_out = bits.random_raw(len(next(iter(columns.values())))) < bound
            for split, chosen in zip(SPLITS, (held_out, ~held_out)):
                if chosen.any():
                    writer.add_columns(columns, split, np.flatnonzero(chosen))
            progress(first, None)
    assert writer.written is not None
    return writer.written, True
