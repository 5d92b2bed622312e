"""Checkpoints of a run: who writes what, where a run resumes from, and whether that belongs to this job.

Law of this file: rank 0 looks for the newest checkpoint that verifies and tells the others which it is; every rank then
reads its own part of that one. What would silently change the meaning of a run (parameters, samples, seed) is refused;
another number of workers or servers is not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.checkpoint import Checkpoint, Keeper, newest, read_part
from mpitrain.checkpoint.parts import FOLDER, listed
from mpitrain.errors import CheckpointError, UsageError
from mpitrain.inject import FileFault, Injection
from mpitrain.job import Job, Overrides
from mpitrain.rules.checkpointing import read_policy
from mpitrain.training import signals


class Resume(NamedTuple):
    """The checkpoint a run goes on from: `folder`, `mark` (accepted samples), `parts`, and what its run was."""

    folder: Path
    mark: int
    parts: tuple[str, ...]
    about: dict[str, Any]

    def part(self, name: str) -> Any:
        """The state of one part, or None where the checkpoint has none of that name."""
        return read_part(self.folder, name) if name in self.parts else None

    def shards(self) -> int:
        """How many shards it was written from."""
        return sum(name.startswith("shard-") for name in self.parts)


def look(overrides: Overrides, run_dir: Path, report: Any) -> Checkpoint | None:
    """On rank 0: where to go on from. `--resume auto` is the newest checkpoint in the run directory, or the beginning
    where none was finished; `--resume DIR` another run's.

    Raises:
        UsageError: no checkpoint in DIR.
        CheckpointError: none of them verifies.
    """
    if overrides.resume is None:
        return None
    source = run_dir if overrides.resume == "auto" else Path(overrides.resume)
    found = newest(source)
    if found is None and overrides.resume != "auto":
        raise UsageError(f"--resume {source}: no checkpoint there (looked in {source / FOLDER})")
    if found is None and listed(source):
        report.event("checkpoint passed over", reason="none was ever finished; the run begins anew")
    for reason in found.refused if found else ():
        report.event("checkpoint passed over", reason=reason)
    if found is not None:
        report.event("resume", checkpoint=str(found.folder), samples=found.mark)
    return found


def tell(runtime: Any, found: Checkpoint | None) -> Resume | None:
    """What rank 0 has found, on all ranks."""
    told = [str(found.folder.resolve()), found.mark, list(found.parts), found.about] if found else None
    told = runtime.share(told)
    return None if told is None else Resume(Path(told[0]), told[1], tuple(told[2]), told[3])


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
        wrote = f"{resume.about['strategy']} ({resume.about.get('kind', 'an older version')})"
        raise UsageError(
            f"{resume.folder} was written by {wrote}, and {about['strategy']} ({about['kind']}) cannot go on from it; "
            "give a strategy of the same kind"
        )
    for key in ("parameters", "num_samples", "seed"):
        if resume.about[key] != about[key]:
            there, here = resume.about[key], about[key]
            if key == "parameters":
                there = sorted(set(there) - set(here)) or "fewer"
                here = sorted(set(here) - set(resume.about[key])) or "fewer"
            raise UsageError(
                f"{resume.folder} was written by another run: its {key} are {there}, this job's are {here}; give the "
                "job that wrote it, or another --run-dir"
            )


def make_keeper(
    job: Job,
    run_dir: Path,
    part: str,
    about: dict[str, Any],
    more: Callable[[], dict[str, Any]],
    writers: tuple[int, ...] = (),
    injections: tuple[Injection, ...] = (),
) -> Keeper:
    """This rank's part of the run's checkpoints."""
    faults = {
        (one.name, one.at_write) for one in injections if isinstance(one, FileFault) and one.part == part
    }

    def warn(text: str) -> None:
        print(f"mpitrain: warning: {text}", flush=True)

    policy = read_policy(job.checkpoint_every, job.mtbf_s)
    return Keeper(
        run_dir,
        part,
        policy,
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
