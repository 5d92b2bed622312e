"""Checkpoints of a run: who writes what, where a run resumes from, and whether that belongs to this job.

Law of this file: rank 0 looks for the newest checkpoint that verifies and tells the others which it is; every rank then
reads its own part of that one. What would silently change the meaning of a run (parameters, samples, seed) is refused;
another number of workers or servers is not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.checkpoint import Checkpoint, Keeper
from mpitrain.checkpoint.parts import candidates, damage, nothing_verifies
from mpitrain.errors import CheckpointError, UsageError
from mpitrain.inject import FileFault
from mpitrain.job import Job
from mpitrain.rules.checkpointing import read_policy
from mpitrain.run_directory import Identity
from mpitrain.training import signals
from mpitrain.training.agree import attempt

if TYPE_CHECKING:
    from mpitrain.training.session import Session

Resume = Checkpoint


def find(runtime: Any, source: Path | None) -> Checkpoint | None:
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
        found = tell(runtime, attempt(runtime, lambda: next(named, None)))
        if found is None:
            break
        mine = damage(found.folder, found.parts[runtime.rank :: runtime.size])
        damaged = [text for told in runtime.allgather(mine) for text in told]
        if not damaged:
            return found._replace(refused=tuple(map(str, refused)))
        refused += map(CheckpointError, damaged)
    attempt(runtime, lambda: nothing_verifies(source, refused) if source and runtime.rank == 0 else None)
    return None


def tell(runtime: Any, found: Checkpoint | None) -> Checkpoint | None:
    """What rank 0 has found, on all ranks."""
    told = None
    if found is not None:
        told = [str(found.folder.resolve()), *found[1:]]
    told = runtime.share(told)
    if told is None:
        return None
    folder, mark, parts, about, identity, refused = told
    return Checkpoint(Path(folder), mark, tuple(parts), about, Identity(*identity), tuple(refused))


def identify(found: Checkpoint | None, run: str, attempt_id: str) -> Identity:
    """Of a run and a start of it that begins from `found`."""
    if found is None:
        return Identity(run, attempt_id)
    source = {"run": found.identity.run, "attempt": found.identity.attempt, "mark": found.mark}
    return Identity(run, attempt_id, source)


def about_run(job: Job, num_samples: int, parameters: list[str], kind: str) -> dict[str, Any]:
    """What a checkpoint says of its run; `parameters`: names and shapes; `kind`: what can go on from it."""
    return {
        "kind": kind,
        "parameters": parameters,
        "num_samples": num_samples,
        "seed": job.seed,
        "strategy": str(job.strategy),
        "batch_size": job.batch_size,
    }


def check(resume: Resume | None, about: dict[str, Any]) -> None:
    """Refuse a checkpoint of something else.

    Raises:
        UsageError: names what differs.
    """
    if resume is None:
        return
    if resume.about.get("kind") != about["kind"]:
        wrote = f"{resume.about.get('strategy')} ({resume.about.get('kind', 'an older version')})"
        raise UsageError(
            f"{resume.folder} was written by {wrote}, and {about['strategy']} ({about['kind']}) cannot go on from it; "
            "give a strategy of the same kind"
        )
    for key in ("parameters", "num_samples", "seed"):
        if resume.about.get(key) != about[key]:
            there, here = resume.about.get(key), about[key]
            if key == "parameters":
                there = sorted(set(there or ()) - set(here)) or "fewer"
                here = sorted(set(here) - set(resume.about.get(key) or ())) or "fewer"
            raise UsageError(
                f"{resume.folder} was written by another run: its {key} are {there}, this job's are {here}; give the "
                "job that wrote it, or another --run-dir"
            )


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
