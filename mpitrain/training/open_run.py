"""Opening the run directory: which checkpoint the run goes on from, which run that makes it, and room for a new one.

Invariants: rank 0 alone changes anything in the directory, and only when it is known which checkpoint the run goes on
from, so a start that is refused leaves everything as it was. `--resume auto` goes on with the run in the directory; a
start without it, or from another directory, is a new run, and an earlier run's files are moved aside.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpitrain.checkpoint import Checkpoint
from mpitrain.checkpoint.parts import FOLDER, UnfinishedError, listed, position_of, survey
from mpitrain.errors import CheckpointError, UsageError
from mpitrain.job import Job, Overrides
from mpitrain.reporting.report import default_run_dir
from mpitrain.strategies.base import Strategy
from mpitrain.strategies.model_parallel.base import Split
from mpitrain.strategies.placement import Roles
from mpitrain.system.files.folders import make_private, unused
from mpitrain.system.files.run_directory import (
    RUN_FILE,
    Identity,
    adopt,
    is_id,
    make_room,
    new_attempt_id,
    new_run_id,
    read_json,
    run_of,
)
from mpitrain.system.files.run_lock import RunLock
from mpitrain.system.launched import rank_status
from mpitrain.training.agree import attempt
from mpitrain.training.resuming.find_checkpoint import find, identify, readers_of
from mpitrain.training.validations.best_model import begin_from

if TYPE_CHECKING:
    from mpitrain.system.launched.ranks import Ranks


class Opened(NamedTuple):
    """A run directory that belongs to this run.

    Attributes:
        resume: the checkpoint that the run goes on from; identity: of the run and this start of it.
        events: to report, as (event, fields), on rank 0; lock: of the directory, on rank 0.
        leg: one more than that of the start from whose directory it goes on, on rank 0.
    """

    run_dir: Path
    resume: Checkpoint | None
    identity: Identity
    events: tuple[tuple[str, dict[str, Any]], ...] = ()
    lock: RunLock | None = None
    leg: int = 1


def open_run(runtime: Ranks, job: Job, overrides: Overrides, roles: Roles) -> Opened:
    """Collective: agree on the directory, on what to go on from and on the run's identity.

    Raises:
        AgreedError: the directory cannot be made, or another job holds it; nothing to go on from where it was named; no
            checkpoint verifies, or the newest is of another version.
    """
    run_dir = Path(runtime.broadcast(attempt(runtime, lambda: _make_run_dir(runtime, job, overrides))))
    source = None
    if overrides.resume is not None:
        source = run_dir if overrides.resume == "auto" else Path(overrides.resume)
    attempt_id = runtime.broadcast(_attempt_of_launch() or new_attempt_id() if runtime.rank == 0 else None)
    lock = RunLock(run_dir, attempt_id) if runtime.rank == 0 else None
    attempt(runtime, lambda: lock.take() if lock else None)
    try:
        own = attempt(runtime, lambda: _by_part(job.run_strategy, runtime.nodes))
        found = find(runtime, source, readers_of(roles, own))
        leg = 1 if found is None or source is None or runtime.rank else _last_leg(source) + 1
        identity, events = _agree_on_identity(runtime, run_dir, source, overrides, found, attempt_id)
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return Opened(run_dir, found, identity, tuple(events), lock, leg)


def _by_part(strategy: Strategy, nodes: tuple[int, ...]) -> Sequence[int]:
    """Ranks in the order of the parts that they write of a checkpoint, where there are no servers."""
    if not isinstance(strategy, Split):
        return range(len(nodes))
    return [rank for row in strategy.grid(nodes).ranks for rank in row]


def _attempt_of_launch() -> str:
    attempt = rank_status.take_attempt()
    return attempt if is_id(attempt) else ""


def _last_leg(source: Path) -> int:
    """Of the latest start in this run directory; 1 where its file does not say."""
    leg = (read_json(source / RUN_FILE) or {}).get("leg")
    return leg if isinstance(leg, int) and not isinstance(leg, bool) and leg > 0 else 1


def _agree_on_identity(
    runtime: Ranks,
    run_dir: Path,
    source: Path | None,
    overrides: Overrides,
    found: Checkpoint | None,
    attempt_id: str,
) -> tuple[Identity, list[tuple[str, dict[str, Any]]]]:
    events: list[tuple[str, dict[str, Any]]] = []

    def take() -> Identity | None:
        if runtime.rank:
            return None
        run = _take_over(run_dir, source, overrides.resume == "auto", found, events)
        return identify(found, run, attempt_id)

    return Identity(*runtime.broadcast(attempt(runtime, take))), events


def _make_run_dir(runtime: Ranks, job: Job, overrides: Overrides) -> str:
    """Rank 0 names and makes the directory; the other ranks see it through the shared file system."""
    path = None
    if runtime.rank == 0:
        path = Path(overrides.run_dir) if overrides.run_dir else default_run_dir(job.name or "job")
        try:
            make_private(path)
        except OSError as error:
            raise UsageError(
                f"cannot make the run directory {path}: {error}; choose another with --run-dir"
            ) from error
    return str(path.resolve()) if path else ""


def _take_over(
    run_dir: Path,
    source: Path | None,
    auto: bool,
    found: Checkpoint | None,
    events: list[tuple[str, dict[str, Any]]],
) -> str:
    """On rank 0: make the directory this run's; returns the run's id."""
    if found is None and source is not None and not auto:
        raise UsageError(f"--resume {source}: no checkpoint there (looked in {source / FOLDER})")
    goes_on = source is not None and source.resolve() == run_dir
    if goes_on and found is None and _is_finished(run_dir):
        goes_on = False
        reason = "the run here has ended, and wrote no checkpoint to go on from: a new one begins"
        events.append(("no checkpoint", {"reason": reason}))
    run = new_run_id()
    if goes_on:
        run = found.identity.run if found else run_of(run_dir) or run
    try:
        if goes_on:
            adopt(run_dir, run)
        elif (moved := make_room(run_dir, run)) is not None:
            events.append(("earlier run moved aside", {"to": str(moved)}))
    except OSError as error:
        raise UsageError(
            f"{run_dir} cannot be written to, or the files of an earlier run there cannot be moved aside: {error}; "
            "give another --run-dir"
        ) from error
    num_samples = found.num_samples() if found else None
    begin_from(run_dir, source, num_samples)
    if found is None and goes_on and listed(run_dir):
        events.append(("checkpoint passed over", {"reason": "none was ever finished; the run begins anew"}))
    if found is not None:
        events += [("checkpoint passed over", {"reason": reason}) for reason in found.refused]
        if goes_on:
            _clear_beyond(run_dir, found.checkpoint_at)
        events.append(
            (
                "resume",
                {"checkpoint": str(found.folder), "samples": num_samples, "run": found.identity.run},
            )
        )
    return run


def _is_finished(run_dir: Path) -> bool:
    """Whether the run in this directory has come to its end."""
    return (read_json(run_dir / "result.json") or {}).get("status") in ("ok", "missed")


def _clear_beyond(run_dir: Path, checkpoint_at: int) -> None:
    """Clear what lies beyond the checkpoint that the run goes on from, since it would be taken for newer checkpoints:
    unfinished folders are removed, damaged ones are renamed."""
    for folder in listed(run_dir):
        if (position_of(folder) or 0) <= checkpoint_at:
            break
        with contextlib.suppress(OSError):
            try:
                survey(folder)
            except UnfinishedError:
                shutil.rmtree(folder)
                continue
            except CheckpointError:
                pass
            os.rename(folder, unused(folder.with_name(f"damaged-{folder.name}")))
