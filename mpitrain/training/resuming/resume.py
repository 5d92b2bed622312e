"""Checkpoints of a run: who writes what, what a rank reads, and whether the checkpoint belongs to this job.

Invariants: every rank reads its own part of the checkpoint that rank 0 has named (`find_checkpoint.py`). A change that
would silently alter the meaning of a run (parameters, samples, seed) is refused; another number of workers or servers
is not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mpitrain.checkpoint import Checkpoint, CheckpointWriter, PartPlan
from mpitrain.errors import CheckpointError, MpitrainError
from mpitrain.inject import FileFault
from mpitrain.strategies.checkpoint_policy import read_policy
from mpitrain.system.optional import reason
from mpitrain.system.saying import say
from mpitrain.training import signals
from mpitrain.training.resuming.resume_options import changed_options, chosen, refuse_others
from mpitrain.training.session import Session


def about_run(session: Session, parameters: list[str], kind: str, optimizer: list[str]) -> dict[str, Any]:
    """What a checkpoint says of its run.

    Args:
        parameters: names and shapes, and how a split model is cut; optimizer: as `describe_optimizer` gives it.
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
        "init": _initial_weights(session),
        "strategy": str(job.strategy),
        "batch_size": job.step_samples,
        "options": chosen(session),
        "allreduce": session.runtime.allreduce_plan.state(),
    }


def _initial_weights(session: Session) -> str | None:
    """The weights that the run began from; a start that goes on with it need not name them again."""
    job, resume = session.job, session.resume
    if job.init is None:
        return resume.about.get("init") if resume else None
    return str(Path(job.init).resolve()) + (", partial" if job.init_partial else "")


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


def make_checkpoint_writer(
    session: Session,
    part: str,
    about: dict[str, Any],
    more: Callable[[], dict[str, Any]],
    writers: tuple[int, ...] = (),
) -> CheckpointWriter:
    """This rank's part of the run's checkpoints."""
    job, orders, injected = session.job, session.overrides.injections, session.injected
    assert injected is not None, "the run has begun"
    faults = {(one.name, one.at_write) for one in orders if isinstance(one, FileFault) and one.part == part}

    def warn(text: str) -> None:
        say(f"mpitrain: warning: {text}")

    plan = PartPlan(
        session.run_dir, part, session.identity.after_losing(len(session.runtime.lost)),
        read_policy(job.checkpoint_every, injected.mtbf_s), job.keep_checkpoints, about, signals.asked, warn, more,
        writers, frozenset(faults), lambda folder, parts: session.report.checkpoint(folder, parts),
        pauses=session.overrides.checkpoint_pause, drawn=injected.of_part(part),
        spent=session.account.spent if session.account else None,
    )  # fmt: skip
    return CheckpointWriter(plan)


@contextlib.contextmanager
def restoring(resume: Checkpoint | None) -> Iterator[None]:
    """Name the checkpoint whose state cannot be gone on from. Also a decorator.

    Raises:
        CheckpointError: whatever went wrong in this block, but for errors that say it themselves.
    """
    try:
        yield
    except MpitrainError:
        raise
    except Exception as error:
        if resume is None:
            raise
        raise CheckpointError(
            f"{resume.folder} holds a state that this run cannot go on from ({reason(error)}): it was written by other "
            "code, or changed since; begin anew without --resume, or go on from an older checkpoint"
        ) from error


def read_own_part(resume: Checkpoint | None, name: str) -> Any:
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
