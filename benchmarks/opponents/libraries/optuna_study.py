"""Optuna: two processes that ask one study for trials, by a journal file as its documentation advises for processes of
one machine. `how`: `random` trains what was drawn to the end, `halving` prunes it by successive halving, `tpe and
halving` draws by itself with TPE."""

import os
from pathlib import Path

import optuna
from digits_trial import account, trial
from measuring.beside import answer_with, settings
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from rounds import Meeting

told, meeting = settings(), Meeting()
optuna.logging.set_verbosity(optuna.logging.WARNING)


def study_of(seed):
    """The study of this sweep, which the first process fills with what was drawn."""
    halves, proposes = "halving" in told["how"], "tpe" in told["how"]
    key = 1000 * seed + meeting.rank
    sampler = optuna.samplers.TPESampler(seed=key, constant_liar=True)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=told["reduction"])
    return optuna.create_study(
        storage=JournalStorage(JournalFileBackend(os.path.join(told["folder"], f"{seed}.journal"))),
        sampler=sampler if proposes else optuna.samplers.RandomSampler(seed=key), study_name=str(seed),
        pruner=pruner if halves else optuna.pruners.NopPruner(), direction="maximize", load_if_exists=True,
    )  # fmt: skip


def run(study, one, seed):
    """One trial, to its end or until it is pruned."""
    low, high = told["rates"]
    lr = one.suggest_float("lr", low, high, log=True)
    batch_size = one.suggest_categorical("batch_size", told["batches"])
    accuracy = 0.0
    for epoch, accuracy in enumerate(trial(told, seed, lr, batch_size), start=1):
        one.report(accuracy, epoch)
        if epoch < told["epochs"] and one.should_prune():
            return study.tell(one, state=optuna.trial.TrialState.PRUNED)
    return study.tell(one, accuracy)


def sweep(seed, drawn):
    """One sweep; every process takes trials until there are no more."""
    if meeting.rank == 0:
        study = study_of(seed)
        for lr, batch_size in drawn if "tpe" not in told["how"] else ():
            study.enqueue_trial({"lr": lr, "batch_size": batch_size})
    meeting.meet()
    study = study_of(seed)
    while (one := study.ask()).number < len(drawn):
        run(study, one, seed)
    study.tell(one, state=optuna.trial.TrialState.FAIL)
    meeting.meet()
    return account(Path(told["folder"]), meeting.size) if meeting.rank == 0 else None


answer_with(sweep)
