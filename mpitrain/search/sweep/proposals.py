"""Configurations that Optuna proposes from what has finished so far, through its ask-and-tell interface.

The study lies in a journal file in the sweep's directory, which all dealers share: there is no database and no server.

Invariants: optuna is imported only by what asks it. One proposal holds for a setting, whoever comes first
(`Sweep.settle`); its value is the mean over seeds and folds. The sampler is keyed by the plan's seed and the
configuration's number, and what it proposes depends on what has finished by then.
"""

from __future__ import annotations

import contextlib
import importlib.util
import threading
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mpitrain.errors import UsageError
from mpitrain.reporting.targets import Choice
from mpitrain.search.sweep.axes import Axis, Integers, LogUniform
from mpitrain.search.sweep.journal import Options, Sweep
from mpitrain.search.sweep.plan import Plan

if TYPE_CHECKING:
    import optuna

STUDY_FILE, STUDY, NUMBER = "optuna.journal", "sweep", "number"


def check_installed() -> None:
    """Refuse to ask Optuna where there is none.

    Raises:
        UsageError: says how to install it.
    """
    if importlib.util.find_spec("optuna") is None:
        raise UsageError(
            "--sampler optuna needs Optuna, which is not installed: pip install 'mpitrain[optuna]', or use --sampler "
            "random"
        )


class Proposals:
    """The study of a sweep, as one dealer has it; its threads may share it."""

    def __init__(self, sweep: Sweep, plan: Plan, by: Choice):
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.plan, self._turn = plan, threading.Lock()
        path = str(sweep.folder / STUDY_FILE)
        backend = JournalFileBackend(path, lock_obj=JournalFileOpenLock(path))
        self._study = optuna.create_study(
            storage=optuna.storages.JournalStorage(backend),
            study_name=STUDY,
            direction="minimize" if by.less_is_better else "maximize",
            load_if_exists=True,
        )

    def ask(self, number: int) -> Options:
        """A setting for the configuration of that number."""
        import optuna

        with self._turn, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that an argument of the sampler is experimental
            self._study.sampler = optuna.samplers.TPESampler(
                seed=1_000_003 * self.plan.sampler_seed + number, constant_liar=True
            )
            trial = self._study.ask({axis.name: _distribution(axis) for axis in self.plan.axes})
            trial.set_user_attr(NUMBER, number)
        return self._setting(trial.params)

    def tell(self, number: int, setting: Options, value: float | None) -> None:
        """What the setting of that configuration has reached; None where it has failed. A proposal that was not taken,
        because another dealer's was there first, counts as failed."""
        import optuna

        state = optuna.trial.TrialState
        with self._turn:
            for trial in self._study.get_trials(deepcopy=False, states=[state.RUNNING]):
                if trial.user_attrs.get(NUMBER) != number:
                    continue
                taken = value is not None and self._setting(trial.params) == setting
                # another dealer may be first, before this call looks or after it
                with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
                    self._study.tell(
                        trial.number,
                        value if taken else None,
                        state=None if taken else state.FAIL,
                        skip_if_finished=True,
                    )

    def _setting(self, params: Mapping[str, object]) -> Options:
        return tuple((axis.name, _text(params[axis.name])) for axis in self.plan.axes)


def _distribution(axis: Axis) -> optuna.distributions.BaseDistribution:
    import optuna

    law = axis.distribution
    if law is None:
        return optuna.distributions.CategoricalDistribution(axis.values)
    if isinstance(law, Integers):
        return optuna.distributions.IntDistribution(law.low, law.high, log=law.log)
    return optuna.distributions.FloatDistribution(law.low, law.high, log=isinstance(law, LogUniform))


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
