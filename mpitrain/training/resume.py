"""Checkpoints of a run: who writes what, where a run resumes from, and whether that belongs to this job.

Invariants: rank 0 looks for the newest checkpoint that verifies and broadcasts which one it is; every rank then reads
its own part of that one. A change that would silently alter the meaning of a run (parameters, samples, seed) is
refused; another number of workers or servers is not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.checkpoint import Checkpoint, Keeper
from mpitrain.checkpoint.parts import candidates, damage, nothing_verifies
from mpitrain.errors import CheckpointError
from mpitrain.inject import FileFault
from mpitrain.strategies.checkpoint_policy import read_policy
from mpitrain.system.run_directory import Identity
from mpitrain.training import signals
from mpitrain.training.agree import attempt
from mpitrain.training.resume_options import changed_options, chosen, refuse_others

if TYPE_CHECKING:
    from mpitrain.mpi.runtime import Runtime
    from mpitrain.training.session import Session

Resume = Checkpoint


def find(runtime: Runtime, source: Path | None) -> Checkpoint | None:
    """The newest checkpoint under `source` that verifies, on all ranks; None where none was ever finished. Collective:
    rank 0 names one whose parts are all there, and every rank looks at the tensors of some of them.

    Args:
        source: a run directory, of which only rank 0's counts; None: begin anew.

    Raises:
        AgreedError: there are checkpoints, and none verifies; or the newest is of another version.
    """
    refused: list[CheckpointError] = []
    named = candidates(source, refused) if source is not None and runtime.rank == 0 else iter(())
    while True:
        found = broadcast(runtime, attempt(runtime, lambda: next(named, None)))
        if found is None:
            break
        mine = damage(found.folder, found.parts[runtime.rank :: runtime.size])
        damaged = [text for texts in runtime.allgather(mine) for text in texts]
        if not damaged:
            return found._replace(refused=tuple(map(str, refused)))
        refused += map(CheckpointError, damaged)
    attempt(runtime, lambda: nothing_verifies(source, refused) if source and runtime.rank == 0 else None)
    return None


def broadcast(runtime: Runtime, found: Checkpoint | None) -> Checkpoint | None:
    """What rank 0 has found, on all ranks."""
    values = runtime.broadcast(None if found is None else [str(found.folder.resolve()), *found[1:]])
    if values is None:
        return None
    folder, checkpoint_at, parts, about, identity, refused = values
    return Checkpoint(Path(folder), checkpoint_at, tuple(parts), about, Identity(*identity), tuple(refused))


def identify(found: Checkpoint | None, run: str, attempt_id: str) -> Identity:
    """Of a run and a start of it that begins from `found`."""
    if found is None:
        return Identity(run, attempt_id)
    source = {
        "run": found.identity.run,
        "attempt": found.identity.attempt,
        "checkpoint_at": found.checkpoint_at,
    }
    return Identity(run, attempt_id, source)


def about_run(session: Session, parameters: list[str], kind: str, optimizer: list[str]) -> dict[str, Any]:
    """What a checkpoint says of its run.

    Args:
        parameters: names and shapes, and how a split model is cut; optimizer: as `describe_optimizer` tells it.
        kind: what can go on from it.
    """
    job, catalogue = session.job, session.catalogue
    return {
        "kind": kind,
        "parameters": parameters,
        "optimizer": optimizer,
        "num_samples": catalogue.num_samples,
        "data": catalogue.digest(),
        "contents": session.contents,
        "seed": job.seed,
        "strategy": str(job.strategy),
        "batch_size": job.batch_size,
        "options": chosen(session),
        "allreduce": session.runtime.allreduce_plan.state(),
    }


def check(session: Session, about: dict[str, Any]) -> None:
    """Refuse a checkpoint of something else; say which options have changed since.

    Raises:
        UsageError: names what differs.
    """
    resume = session.resume
    if resume is None:
        return
    refuse_others(resume.about, about, resume.folder)
    changed = changed_options(resume.about.get("options", {}), about["options"])
    if changed and not session.runtime.lost:
        session.report.event("other options", **changed)


def make_keeper(
    session: Session,
    part: str,
    about: dict[str, Any],
    more: Callable[[], dict[str, Any]],
    writers: tuple[int, ...] = (),
) -> Keeper:
    """This rank's part of the run's checkpoints."""
    job, orders = session.job, session.overrides.injections
    faults = {(one.name, one.at_write) for one in orders if isinstance(one, FileFault) and one.part == part}

    def warn(text: str) -> None:
        print(f"mpitrain: warning: {text}", flush=True)

    return Keeper(
        session.run_dir,
        part,
        session.identity.after_losing(len(session.runtime.lost)),
        read_policy(job.checkpoint_every, job.mtbf_s),
        job.keep_checkpoints,
        about,
        signals.asked,
        warn,
        more,
        writers,
        frozenset(faults),
    )


def read_own_part(resume: Resume | None, name: str) -> Any:
    """This rank's state in the checkpoint; None without one.

    Raises:
        CheckpointError: damaged since rank 0 has verified it.
    """
    if resume is None:
        return None
    try:
        return resume.part(name)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; start again with --resume auto") from error
