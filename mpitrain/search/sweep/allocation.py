"""A sweep inside one launch of ranks: every group of ranks takes the next task as soon as it is free.

Invariants: nobody deals for the others. The first rank of each group claims from the journal (`journal.py`), so no rank
is kept for dealing, and a group that trains is never waited for. The ranks stay up between runs, so a run costs neither
imports nor MPI's start. All ranks meet before the first task and after the last one.
"""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.errors import EXIT_ERROR, EXIT_REQUEUE, AgreedError, UsageError
from mpitrain.reporting.targets import read_choice
from mpitrain.search.sweep.check import Read, Setup
from mpitrain.search.sweep.deal import Task
from mpitrain.search.sweep.journal import Dealer, Sweep
from mpitrain.search.sweep.local import Dealt
from mpitrain.search.sweep.plan import plan_from
from mpitrain.search.sweep.runs import Proposer, Work
from mpitrain.system.saying import tell
from mpitrain.system.tracebacks import own_part
from mpitrain.training import signals, train_and_go_on

if TYPE_CHECKING:
    from mpitrain.mpi.runtime import Runtime


def deal_to_groups(
    whole: Runtime, sweep: Sweep, setup: Setup, read: Read, propose: Callable[[], Proposer | None]
) -> Dealt | None:
    """Collective over all ranks: train what is left of a sweep; returns what became of the time on rank 0.

    Raises:
        UsageError: the ranks make no whole groups.
    """
    from mpitrain.mpi.runtime import end_group, start_group

    num_ranks = setup.plan.ranks_per_run
    if whole.size % num_ranks:
        raise UsageError(
            f"{whole.size} ranks make no groups of --ranks-per-run {num_ranks}: start a multiple of {num_ranks}"
        )
    group = start_group(num_ranks)
    whole.barrier()
    began_s = time.monotonic()
    serve = _Group(group, setup, read, whole.processes[0])
    busy_s, asked = serve.lead(sweep, propose()) if group.rank == 0 else serve.follow()
    end_group(whole, group)
    gathered = whole.gather([group.rank == 0, busy_s, asked])
    elapsed_s = time.monotonic() - began_s
    if gathered is None:
        return None
    code = EXIT_REQUEUE if any(asked for _, _, asked in gathered) else 0
    return Dealt(elapsed_s, tuple(busy_s for leads, busy_s, _ in gathered if leads), code)


class _Group:
    """The ranks of one group, which train one task at a time."""

    def __init__(self, group: Runtime, setup: Setup, read: Read, launch: str):
        self.group, self.setup, self.read, self.launch = group, setup, read, launch
        self.ended_on_request = False

    def asked(self) -> bool:
        """Whether this group has been asked to end."""
        return self.ended_on_request or signals.asked()

    def lead(self, sweep: Sweep, proposer: Proposer | None) -> tuple[float, bool]:
        """Claim tasks and train them with the others of the group; returns the seconds in which there was one, and
        whether an end was asked for."""
        with Dealer(sweep, self.launch) as dealer:
            busy_s = Work(sweep, self.setup, dealer, self._train, self.asked, proposer).run()
        self.group.broadcast(None)
        return busy_s, self.asked()

    def follow(self) -> tuple[float, bool]:
        """Train what the first rank of the group has claimed."""
        while (order := self.group.broadcast(None)) is not None:
            self._carry_out(*order)
        return 0.0, self.asked()

    def _train(self, task: Task, words: list[str], log: Path) -> tuple[int, str]:
        self.group.broadcast([words, str(log)])
        return self._carry_out(words, str(log))

    def _carry_out(self, words: list[str], log: str) -> tuple[int, str]:
        """The exit code of a run and why it failed. Its output goes to the log."""
        overrides, settings = self.read(words)
        with _printing_to(log):
            try:
                result = train_and_go_on(self.setup.plan.job, overrides, settings)
                code, reason = int(result["exit_code"]), str(result["failure"] or "")
            except AgreedError as error:
                code, reason = error.exit_code, str(error)
            except Exception as error:
                traceback_text = own_part(error) or "".join(traceback.format_exception(error))
                tell(traceback_text, end="")
                code, reason = EXIT_ERROR, f"{type(error).__name__}: {error}"
        gc.collect()  # a model and its optimizer may hold each other
        self.ended_on_request = self.ended_on_request or code == EXIT_REQUEUE
        return code, reason


@contextlib.contextmanager
def _printing_to(log: str) -> Iterator[None]:
    with (
        open(log, "a", encoding="utf-8") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        yield


def share(whole: Runtime, opened: tuple[Sweep, Setup] | None) -> tuple[Sweep, Setup]:
    """Collective: what rank 0 has opened, on every rank."""
    brought: dict[str, Any] | None = None
    if opened is not None:
        sweep, setup = opened
        brought = {
            "folder": str(sweep.folder), "plan": setup.plan.to_json(), "num_samples": setup.num_samples,
            "reduction": setup.reduction,
        }  # fmt: skip
    found = whole.broadcast(brought)
    plan = plan_from(found["plan"], Path(found["folder"]))
    by = read_choice(plan.metric) if plan.metric else None
    setup = Setup(plan, tuple(plan.configurations()), by, found["num_samples"], found["reduction"])
    return Sweep(Path(found["folder"])), setup
