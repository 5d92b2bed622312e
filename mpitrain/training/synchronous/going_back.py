"""All ranks go back to what all last held alike, and redo the steps since, when a comparison of replicas fails.

Invariants: every rank keeps a copy, in host memory, of what it held when a comparison last found all alike, and goes
back to its own: nobody needs to know which of two replicas was damaged, and what a flipped bit has spread through the
averaged gradients is undone. Random numbers are functions of rank and step, so the steps that are redone are those of
an undisturbed run, to the bit. All ranks reach the same verdict, so all go back together. What comes again each time is
no accident: after `MOST_TIMES` at one place the run ends with the error. A difference by rounding that comes again is
that of other processors, and from then on told and no more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

from mpitrain.errors import ReplicasPartedError, WireError
from mpitrain.system.launched.ranks import Ranks
from mpitrain.training.agree import attempt
from mpitrain.training.replica_guard import ReplicaGuard
from mpitrain.training.synchronous.checkpoints import StepCheckpoints, copied
from mpitrain.training.synchronous.stepper import Stepper
from mpitrain.training.validations.best_model import Validations

MOST_TIMES = 3  # in a row to one place
Found = ReplicasPartedError | WireError


class GoBackError(Exception):
    """Ranks do not hold the same: raised on all of them together, and answered by `GoingBack.go_back`."""


class Steps(Protocol):
    """A trainer, as far as it can go back."""

    stepper: Stepper
    replicas: ReplicaGuard
    checkpoints: StepCheckpoints
    validations: Validations

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of what all share."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""

    def own_state(self) -> dict[str, Any]:
        """What this rank alone holds."""

    def restore_own(self, own: dict[str, Any]) -> None:
        """Continue from what `own_state` returned."""


class GoingBack:
    """Whether ranks agree, and what follows where they do not.

    Args:
        runtime: of all ranks; wanted: whether to go back, or to end with the error.

    Attributes:
        tell: is told of every time.
        times, redone_steps: how often all have gone back, and how many steps that has cost.
    """

    tell: Callable[..., None]

    def __init__(self, runtime: Ranks, wanted: bool):
        self.runtime, self.wanted = runtime, wanted
        self.times = self.redone_steps = 0
        self._kept: dict[str, Any] | None = None
        self._times_here = 0
        self._found: Found | None = None

    def keep(self, trainer: Steps) -> None:
        """All ranks hold the same now, which is what to go back to from here on."""
        if self.wanted:
            kept = {"state": trainer.state(), "own": trainer.own_state()}
            scale = copy.copy(trainer.stepper.own_gradients.scale)
            self._kept = copied(kept) | {"scale": scale, "step": trainer.stepper.step}
            self._times_here = 0
            self.freshen(trainer)

    def freshen(self, trainer: Steps) -> None:
        """A validation may have come since, which moves no parameter, and which is not to be made again."""
        kept, stepper = self._kept, trainer.stepper
        if kept is not None and kept["step"] == stepper.step:
            kept["state"].update(stepper.updates.pace.state(stepper.samples))
            kept["validated"] = trainer.validations.place

    def look(self, trainer: Steps, compare: Callable[[], bool]) -> None:
        """Collective: compare, and keep what all hold where they agree.

        Raises:
            GoBackError: they do not, and there is something to go back to; AgreedError: there is not.
        """
        self._found = None

        def compared() -> bool:
            try:
                return compare()
            except (ReplicasPartedError, WireError) as found:
                if self._kept is None:
                    raise
                if self._times_here >= MOST_TIMES:
                    raise type(found)(
                        f"{found}; all ranks have gone back to step {self._kept['step']} {MOST_TIMES} times, and this "
                        "came again each time, so it is no bit that flipped once"
                    ) from found
                self._found = found
                return False

        alike = attempt(self.runtime, compared)
        if self._found is not None:
            raise GoBackError
        if alike:
            self.keep(trainer)

    def run(self, trainer: Steps, once: Callable[[], None]) -> None:
        """Run a trainer's steps, which `once` does, until they come to the end of the run and all ranks agree."""
        self.keep(trainer)
        while True:
            try:
                once()
            except GoBackError:
                self._go_back(trainer)
            else:
                self._kept = None  # what differs from here on ends the run
                return

    def _go_back(self, trainer: Steps) -> None:
        """Collective: all ranks hold again what they last held alike.

        Raises:
            AgreedError: they do not, since a copy has been damaged.
        """
        kept, found, stepper = self._kept, self._found, trainer.stepper
        assert kept is not None and found is not None
        self.times, self._times_here = self.times + 1, self._times_here + 1
        num_redone, step = stepper.step - kept["step"], kept["step"]
        self.redone_steps += num_redone
        self.tell("went back", to_step=step, redone_steps=num_redone, times=self.times, reason=str(found))
        trainer.checkpoints.writer.wait()
        with trainer.checkpoints.guard.changing():
            again = copied(
                {"state": kept["state"], "own": kept["own"]}
            )  # optimizers step the tensors they are given
            trainer.restore(again["state"])
            trainer.restore_own(again["own"])
        stepper.own_gradients.scale = copy.copy(kept["scale"])
        stepper.begin_anew()
        trainer.validations.go_back_to(kept["validated"])
        trainer.checkpoints.go_back_to(stepper.samples, step)
        self.runtime.step = step - 1
        trainer.replicas.begin_at(step)
        if self._times_here > 1 and isinstance(found, ReplicasPartedError):
            trainer.replicas.takes_rounding = found.by_rounding
        attempt(self.runtime, trainer.replicas.compare)

    def result(self) -> dict[str, Any]:
        """For `result.json`."""
        return {"went_back": {"times": self.times, "redone_steps": self.redone_steps}} if self.wanted else {}
