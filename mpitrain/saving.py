"""Checkpoints of a loop of one's own: `mt.save(run_dir, step)`, and `mt.wrap(..., resume=run_dir)`.

Law of this file: every worker calls `save` at the same step, each writes what it holds, and servers what they hold, in
the parts that `mpitrain train` writes too; a checkpoint is complete when all parts are there. What is resumed goes on
bit for bit where the strategy is synchronous or has one worker. Position in the data, schedulers and random numbers are
the loop's own: it hands them in as `state`, and finds them again in `resumed()`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mpitrain.checkpoint import newest, write_part
from mpitrain.checkpoint.parts import folder_of, prune
from mpitrain.errors import CheckpointError, UsageError
from mpitrain.training.cutting import copied, own_part
from mpitrain.training.resuming import Resume, tell
from mpitrain.training.session import attempt

if TYPE_CHECKING:
    from mpitrain.roles import Save
    from mpitrain.rules import Strategy


class Resumed(NamedTuple):
    """What a loop goes on from: the `step` given to `save`, and this worker's `state` then."""

    step: int
    state: Any


@dataclasses.dataclass
class Saver:
    """How this worker writes.

    Args:
        about: the run; part: this worker's; parts: all of them, on the worker that writes the first.
        take: its state, given (step, run directory, checkpoints to keep).
    """

    about: dict[str, Any]
    part: str
    parts: list[str]
    take: Callable[[int, Path, int], dict[str, Any]]

    def save(self, run_dir: Path, step: int, state: Any, keep: int) -> None:
        """`mt.save`."""
        tree = copied({**self.take(step, run_dir, keep), "loop": state})
        try:
            write_part(folder_of(run_dir, step), self.part, tree, self.parts, self.about)
        except TypeError as error:
            raise UsageError(f"save: {error}; give numbers, texts, lists, dicts and tensors") from error
        if self.parts:
            prune(run_dir, keep)


def about_loop(strategy: Strategy, model: torch.nn.Module, num_workers: int) -> dict[str, Any]:
    """What a checkpoint says of its run."""
    parameters = [f"{name} {tuple(value.shape)}" for name, value in model.named_parameters()]
    kind = f"{strategy.family} in a loop of one's own"
    return {
        "kind": kind, "strategy": str(strategy), "parameters": parameters, "workers": num_workers,
    }  # fmt: skip


def look(runtime: Any, resume: str | Path | None, about: dict[str, Any], same_number: bool) -> Resume | None:
    """The newest checkpoint under `resume` on all ranks, None where there is none; collective.

    Args:
        same_number: whether only as many workers can go on from it.

    Raises:
        AgreedError: none verifies, or it is of another run.
    """
    if runtime.share(None if resume is None else str(resume)) is None:
        return None
    found = attempt(
        runtime, lambda: newest(Path(resume)) if runtime.rank == 0 and resume is not None else None
    )
    told = tell(runtime, found)

    def check() -> None:
        for key in ("kind", "parameters", *(("workers",) if same_number else ())):
            if told is not None and told.about.get(key) != about[key]:
                raise UsageError(
                    f"{told.folder} was written by {told.about.get('strategy')}, whose {key} was "
                    f"{told.about.get(key)}; here it is {about[key]}"
                )

    attempt(runtime, check)
    return told


def loop_state(resume: Resume | None, part: str, first: str) -> Resumed | None:
    """What the loop had handed in on this worker; on a worker that was not there before, the first worker's."""
    if resume is None:
        return None
    saved = resume.part(part if part in resume.parts else first)
    return Resumed(resume.mark, saved["loop"] if saved else None)


def write_shard(part: str, about: dict[str, Any], workers: tuple[int, ...], store: Any) -> Any:
    """What a server does when all workers have come: a write that fails leaves the checkpoint before as it is."""

    def write(order: Save, role: dict[str, Any], present: list[int]) -> None:
        told = json.loads(order.text)
        shards = [f"shard-{shard}" for shard in range(about["servers"])]
        parts = (
            shards + [f"worker-{workers.index(worker)}" for worker in present] if part == shards[0] else []
        )
        run_dir = Path(told["run_dir"])
        try:
            state = {"role": role, "store": store.state()}
            write_part(folder_of(run_dir, order.mark), part, state, parts, about)
        except CheckpointError as error:
            print(f"mpitrain: warning: {error}", file=sys.stderr, flush=True)
            return
        if parts:
            prune(run_dir, told["keep"])

    return write


def lockstep_saver(about: dict[str, Any], rank: int, size: int, take: Callable[[], dict[str, Any]]) -> Saver:
    """Of strategies without servers: all are at the same step by themselves."""
    parts = [own_part(other) for other in range(size)] if rank == 0 else []
    return Saver(about, own_part(rank), parts, lambda step, run_dir, keep: take())
