"""A synchronous run that goes on without the ranks that die (ULFM): shrink, agree on a step, redo.

Invariants: a rank can be at most one step ahead of another, for the next allreduce needs everybody. Where some
have finished the step in which a rank died, its gradient is in their parameters: all go on from theirs, sent by one of
them. Where nobody has, no parameter has changed, and the step is done again by those that are left. So no copy of the
parameters is ever taken, and what follows is what a resume from a checkpoint of that step with fewer workers does, to
the bit. Every rank may die, rank 0 as well: the lowest one left takes its duties over. Under local SGD the averagings
are the steps: what ranks did since the last one is done again, from a copy.

A codec's residual is a worker's own and is lost with it. The others redo the step with theirs as it was before, or, if
what they had sent was used, after.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, Protocol

from mpitrain.errors import AgreedError
from mpitrain.mpi.faults.agreement import CONTINUE, NO_FAILURE, agree
from mpitrain.mpi.faults.errors import CALLED_OFF, CalledOffError, is_lost_peer
from mpitrain.mpi.faults.shrink import process_failed, shrink
from mpitrain.mpi.process_group.process_group import init_default_group, leave_default_group
from mpitrain.mpi.runtime import Runtime
from mpitrain.reporting.report import NullReport
from mpitrain.training.outcome import RunOutcome
from mpitrain.training.session import Session
from mpitrain.training.share_tree import share_tree
from mpitrain.training.synchronous.allreduce_record import settle_allreduce
from mpitrain.training.synchronous.recovery_state import RecoveryState


class Retrainable(Protocol):
    """A trainer whose run others can take up."""

    def run(self) -> None:
        """Train to the end."""

    def outcome(self) -> RunOutcome:
        """What this rank knows of the run."""

    def keep_state(self) -> RecoveryState:
        """What this rank goes on from, once the checkpoints under way are written."""


class Survivors:
    """The run of one rank through the deaths of others.

    Args:
        session: of the run; make: a trainer that begins, or goes on from what it is given.
    """

    def __init__(self, session: Session, make: Callable[[RecoveryState | None], Retrainable]):
        self.session, self.runtime, self.make = session, session.mpi, make
        self.trainer: Retrainable | None = None
        self.kept = RecoveryState()
        self.recoveries: list[dict[str, Any]] = []
        self.reported = set(self.runtime.lost)

    def run(self) -> RunOutcome:
        """Train until all that are left agree that they have come to the end; returns this rank's outcome."""
        self.runtime.survives_shrink = True
        error: BaseException | None = None
        agreed = False
        while True:
            try:
                outcome = self._train(error, agreed)
                if (
                    agreement := agree(self.runtime.engine, self.runtime.comm, NO_FAILURE | CONTINUE)
                ) & NO_FAILURE:
                    break
                if not agreement & CONTINUE:
                    raise CalledOffError(CALLED_OFF)
                error, agreed = process_failed(), True
            except CalledOffError:
                raise
            except AgreedError:
                self._leave()
                raise
            except Exception as failure:
                if not is_lost_peer(failure):
                    raise
                error, agreed = failure.with_traceback(None), False
            self._drop_trainer()
        self._leave()
        if outcome.result is not None:
            lost = sorted(rank for row in self.recoveries for rank in row["lost"])
            outcome.result |= {
                "lost": {str(rank): "died" for rank in lost},
                "recoveries": self.recoveries,
            }
        return outcome

    def _train(self, error: BaseException | None, agreed: bool) -> RunOutcome:
        began_s = time.monotonic()
        if error is not None:
            shrink(self.runtime, error, agreed)
            if self.runtime.rank == 0 and isinstance(self.session.report, NullReport):
                self.session.lead()
        init_default_group(self.runtime)
        if error is not None:
            self.kept = agree_on_state(self.runtime, self.kept)
        settle_allreduce(self.session)
        self.trainer = self.make(self.kept if self.kept.step >= 0 else None)
        if error is not None:
            self._report(time.monotonic() - began_s)
        self.trainer.run()
        return self.trainer.outcome()

    def _leave(self) -> None:
        self.runtime.survives_shrink = False
        leave_default_group(self.runtime)

    def _drop_trainer(self) -> None:
        """Drop the trainer: while its DDP lives, its hooks hang on the parameters."""
        if self.trainer is not None:
            self.kept = self.trainer.keep_state()
            self.trainer = None
        self.session.in_emergency(None, "ranks have died, and the others have not yet begun anew")
        gc.collect()

    def _report(self, pause_s: float) -> None:
        lost = sorted(self.runtime.lost - self.reported)
        self.reported |= self.runtime.lost
        step, workers = max(0, self.kept.step), self.runtime.size
        self.recoveries.append({"step": step, "lost": lost, "workers": workers, "pause_s": pause_s})
        for rank in lost:
            self.session.report.event("worker lost", rank=rank, how="died", step=step)
        self.session.report.event("recovered", step=step, workers=workers, pause_s=pause_s)


def agree_on_state(runtime: Runtime, mine: RecoveryState) -> RecoveryState:
    """Collective: what this rank goes on from, where everybody brings their own: those who are behind take the state of
    the first one who is not."""
    everybody = runtime.allgather([mine.step, mine.failure, mine.validating])
    mine = mine._replace(validating=everybody[0][2])  # the first reports it, and knows whether it has
    newest = max(step for step, *_ in everybody)
    source = [step for step, *_ in everybody].index(newest)
    failure = next((failure for _, failure, _ in everybody if failure), "")
    if all(step == newest for step, *_ in everybody):
        return mine._replace(failure=failure, own=mine.own_before)
    tree = share_tree(runtime, {"state": mine.state, "own": mine.own_before}, source)
    if mine.step == newest:
        return mine._replace(failure=failure, own=mine.own_before)
    return mine._replace(step=newest, failure=failure, state=tree["state"], own_before=tree["own"])
