"""What becomes of every option when a run goes on from a checkpoint: one table, and the checks and reports made by it.

Invariants: no option is accepted and ignored. An option that is set now takes effect; one that cannot without changing
the meaning of the training so far (seed, data, batches in the middle of an epoch) is refused with the old value and the
new one.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpitrain.codecs.base import Codec
from mpitrain.errors import UsageError
from mpitrain.job import Job, Overrides
from mpitrain.job.option import ACTS, CONVERTED, declared
from mpitrain.model.optimizers.several_optimizers import SeveralOptimizers
from mpitrain.strategies.base import Strategy
from mpitrain.training.resuming.fingerprint import fingerprint, options
from mpitrain.training.session import Session
from mpitrain.values import parse

# Fields of `Job` and of `Overrides` (the options of `train`), each as it was declared, and what a launch decides.
# Options of a dry run alone are no part of a run. `docs/fault-tolerance.md` says the same in words; a test walks them.
ON_RESUME = {
    **{one.name: one.metadata.get("resume", ACTS) for one in dataclasses.fields(Job)},
    **{name: one.resume for name, (one, _) in declared(Overrides).items()},
    "servers": CONVERTED,
    "workers": CONVERTED,  # a split model needs as many parts
}
_NOT_COMPARED = ("name", "run_dir", "resume", "quiet", "synthetic")


def shapes_of(module: nn.Module) -> list[str]:
    """Its parameters, by name and shape."""
    return [f"{name} {tuple(one.shape)}" for name, one in module.named_parameters()]


def describe_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The optimizer's class, and the parameters of each of its groups: what its saved state belongs to."""
    if isinstance(optimizer, SeveralOptimizers):
        several = optimizer.optimizers.items()
        return [
            "several",
            *(f"{name}: {text}" for name, one in several for text in describe_optimizer(module, one)),
        ]
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = [
        " ".join(names.get(id(parameter), "?") for parameter in group["params"])
        for group in optimizer.param_groups
    ]
    return [type(optimizer).__name__, *groups]


def chosen(session: Session) -> dict[str, Any]:
    """Everything that can be chosen, as JSON values to compare."""
    overrides = dataclasses.asdict(session.overrides)
    asked = {name: fingerprint(overrides[name]) for name in ("lr", "steps", "watchdog_s", "heartbeat_s")}
    launched = {"servers": len(session.roles.servers), "workers": len(session.roles.workers)}
    everything = {**options(session.job), **asked, "inject": list(session.overrides.inject), **launched}
    return {name: value for name, value in everything.items() if name not in _NOT_COMPARED}


def changed_options(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """What differs between two runs' `chosen`, as "old -> new"."""
    return {
        name: f"{_short(before.get(name))} -> {_short(now.get(name))}"
        for name in now
        if before.get(name) != now[name]
    }


def _short(value: object) -> str:
    if isinstance(value, list) and len(value) > 2:
        return f"{_short(value[:2])} and {len(value) - 2} more"
    text = str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def refuse_others(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Refuse to go on from a checkpoint of something else; both are what `about_run` says.

    Raises:
        UsageError: names what differs, the old value and the new.
    """
    if before.get("kind") != now["kind"]:
        wrote = f"{before.get('strategy')} ({before.get('kind', 'an older version')})"
        raise UsageError(
            f"{folder} was written by {wrote}, and {now['strategy']} ({now['kind']}) cannot go on from it; "
            "give a strategy of the same kind"
        )
    _check_strategy(parse(before["strategy"], "strategy"), parse(now["strategy"], "strategy"), folder)
    for key, words in _SAME.items():
        there: Any = before.get(key)
        here: Any = now.get(key)
        if key == "contents":  # known of packs by `mpitrain data pack` only, and compared file by file
            both = set(there or {}) & set(here)
            there, here = ({name: each[name] for name in sorted(both)} for each in (there or {}, here))
        if there == here:
            continue
        if key == "optimizer" and there and there[0] != here[0]:
            there, here = there[0], here[0]
        if isinstance(there, list):
            there, here = (
                sorted(set(there) - set(here)) or "fewer",
                sorted(set(here) - set(there)) or "fewer",
            )
        raise UsageError(
            f"{folder} was written by another run: its {words} {_short(there)}, this job's {words.split()[-1]} "
            f"{_short(here)}; give the job that wrote it, or another --run-dir"
        )


_SAME = {
    "parameters": "parameters are",
    "optimizer": "optimizer (class and parameters of its groups) is",
    "num_samples": "num_samples are",
    "data": "data (names, sizes and arrays of the shards, window_chunks) is",
    "contents": "shards (by SHA-256) are",
    "seed": "seed is",
    "init": "initial weights are",
    "workers": "number of workers, which step together, is",
}


def _check_strategy(before: Any, now: object, folder: Path) -> None:
    """Refuse a change that would lose the residual of a codec."""
    for key in ("codec", "push_wire"):
        old, new = _codec(before, key), _codec(now, key)
        if old is None or new is None or old.name == new.name or not keeps_back(before, old):
            continue
        raise UsageError(
            f"{folder} was written with {key}={old}, and holds its residual; {key}={new} cannot go on from "
            f"it: keep {old.name}(), or begin anew"
        )


def _codec(strategy: Any, key: str) -> Codec | None:
    assert isinstance(strategy, Strategy)
    return strategy.push_codec if key in strategy.wire_fields else None


def same_codec(about: dict[str, Any], now: Strategy, key: str) -> bool:
    """Whether the run that wrote the checkpoint had a codec of the same name: only then this run can use its state."""
    old, new = _codec(parse(about["strategy"], "strategy"), key), _codec(now, key)
    return old is not None and new is not None and old.name == new.name


def keeps_back(strategy: Strategy, codec: Codec) -> bool:
    """Whether something is lost with the state of this codec: a residual. Peers that mix parameters keep none."""
    return not strategy.mixes and codec.has_residual
