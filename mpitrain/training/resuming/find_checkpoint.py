"""Which checkpoint a run goes on from.

Invariants: rank 0 looks for the newest checkpoint that verifies and broadcasts which one it is, so all ranks go on from
the same one. Each part is verified by one rank: by the one that goes on with it, where there is such a rank, which then
holds what it has read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.checkpoint import Checkpoint
from mpitrain.checkpoint.parts import candidates, damage, nothing_verifies
from mpitrain.errors import CheckpointError
from mpitrain.strategies.placement import Roles
from mpitrain.system.files.run_directory import Identity, samples_of
from mpitrain.training.agree import attempt

if TYPE_CHECKING:
    from mpitrain.system.launched.ranks import Ranks


# Ranks by the kind of a part ("shard", "worker", "own"): the one of number i goes on with part i of the kind.
Readers = Mapping[str, Sequence[int]]


def readers_of(roles: Roles, own: Sequence[int]) -> Readers:
    """Who goes on with which part. `own`: where there are no servers, the ranks by the numbers of their parts; the
    first one hands on what is for all."""
    if roles.servers:
        return {"shard": roles.servers, "worker": roles.workers}
    return {"shard": own[:1], "own": own}


def find(runtime: Ranks, source: Path | None, readers: Readers) -> Checkpoint | None:
    """The newest checkpoint under `source` that verifies, on all ranks; None where none was ever finished. Collective:
    rank 0 names one whose parts are all there, and every rank looks at the tensors of some of them.

    Args:
        source: a run directory, of which only rank 0's counts; None: begin anew.
        readers: who goes on with which part, where there are as many shards.

    Raises:
        AgreedError: there are checkpoints, and none verifies; or the newest is of another version.
    """
    refused: list[CheckpointError] = []
    named = candidates(source, refused) if source is not None and runtime.rank == 0 else iter(())
    while True:
        found = broadcast(runtime, attempt(runtime, lambda: next(named, None)))
        if found is None:
            break
        keepers = [_reader(found, name, readers) for name in found.parts]
        looks = (index % runtime.size if one is None else one for index, one in enumerate(keepers))
        mine = [name for name, rank in zip(found.parts, looks, strict=True) if rank == runtime.rank]
        kept = [name for name, rank in zip(found.parts, keepers, strict=True) if rank == runtime.rank]
        damaged = [text for texts in runtime.allgather(damage(found, mine, kept)) for text in texts]
        if not damaged:
            return found._replace(refused=tuple(map(str, refused)))
        refused += map(CheckpointError, damaged)
    attempt(runtime, lambda: nothing_verifies(source, refused) if source and runtime.rank == 0 else None)
    return None


def _reader(found: Checkpoint, name: str, readers: Readers) -> int | None:
    """The rank that goes on with a part; None where it is nobody's, or of interest to several."""
    kind, number = name.split("-")
    ranks = readers.get(kind, ())
    if int(number) >= len(ranks) or (kind == "shard" and len(ranks) != found.shards()):
        return None
    return ranks[int(number)]


def broadcast(runtime: Ranks, found: Checkpoint | None) -> Checkpoint | None:
    """What rank 0 has found, on all ranks."""
    values = runtime.broadcast(None if found is None else [str(found.folder.resolve()), *found[1:6]])
    if values is None:
        return None
    folder, checkpoint_at, parts, about, identity, refused = values
    return Checkpoint(
        Path(folder), checkpoint_at, tuple(parts), about, Identity(*identity), tuple(refused), {}
    )


def identify(found: Checkpoint | None, run: str, attempt_id: str) -> Identity:
    """Of a run and a start of it that begins from `found`."""
    if found is None:
        return Identity(run, attempt_id)
    source = {
        "run": found.identity.run,
        "attempt": found.identity.attempt,
        "checkpoint_at": found.checkpoint_at,
        "samples": samples_of(found.folder),
    }
    return Identity(run, attempt_id, source)
