"""The one table of everything that can stand in the text of a strategy.

A row is a public name and the module below `mpitrain/` that defines it. From these rows are made the public
names of `mpitrain` and of `mpitrain.strategies`, what the text parser knows, the help of the command line and the
tables of the documentation. So a new strategy, damping, codec or schedule is one file, in which `register` gives it
its kind and its name in texts, and one row here. The decoders of all kinds of messages come from these rows, too.

Invariants: importing this module imports no value; a value's module is imported when its name is used, and all of
them before the first text is read.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mpitrain.values import Value

# In the order in which help and tables list them.
MODULES = {
    # strategies
    "AllReduce": "strategies.allreduce",
    "LocalSGD": "strategies.local_sgd",
    "Decentralized": "strategies.decentralized",
    "Sync": "strategies.parameter_server.sync",
    "Backup": "strategies.parameter_server.sync",
    "Hybrid": "strategies.parameter_server.hybrid",
    "Async": "strategies.parameter_server.asynchronous",
    "SoftSync": "strategies.parameter_server.softsync",
    "StaleSync": "strategies.parameter_server.ssp",
    "Bounded": "strategies.parameter_server.bounded",
    "Elastic": "strategies.parameter_server.elastic",
    "Pipeline": "strategies.model_parallel.pipeline",
    "TensorParallel": "strategies.model_parallel.tensor",
    "Sharded": "strategies.model_parallel.sharded",
    # dampings
    "Keep": "strategies.damping.keep",
    "Inverse": "strategies.damping.inverse",
    "Drop": "strategies.damping.drop",
    "Power": "strategies.damping.power",
    "DelayCompensated": "strategies.damping.delay_compensated",
    "GapAware": "strategies.damping.gap_aware",
    # codecs
    "Uncompressed": "codecs.none",
    "Float16": "codecs.floats",
    "BFloat16": "codecs.floats",
    "EightBit": "codecs.eightbit",
    "OneBit": "codecs.onebit",
    "Threshold": "codecs.threshold",
    "TopK": "codecs.topk",
    "PowerSGD": "codecs.powersgd",
    "QSGD": "codecs.qsgd",
    # learning-rate schedules
    "ConstantRate": "strategies.schedules",
    "Cosine": "strategies.schedules",
    "Decay": "strategies.schedules",
    "Gradual": "strategies.schedules",
    # warm-up, batch sizes of workers, and outer optimizers of local SGD
    "Warmup": "strategies.warmup",
    "PerWorker": "strategies.parameter_server.batch_size",
    "PerRound": "strategies.parameter_server.batch_size",
    "BySpeed": "strategies.parameter_server.batch_size",
    "Average": "strategies.local_sgd",
    "SlowMo": "strategies.local_sgd",
    "DiLoCo": "strategies.local_sgd",
}


class Row(NamedTuple):
    """What help and documentation say of one value.

    kind: such as "strategy" or "damping"; name: in texts; public: in Python, as `mpitrain.<public>`; signature: how it
    is written, with the arguments of its own and their defaults; inherited: the arguments that it shares with its
    family, in the same form, or nothing; summary: the first sentence of its docstring.
    """

    kind: str
    name: str
    public: str
    signature: str
    inherited: str
    summary: str


def find(public: str) -> type[Value]:
    """The class with this public name.

    Raises:
        KeyError: there is no such row.
    """
    found: type[Value] = getattr(importlib.import_module(f"mpitrain.{MODULES[public]}"), public)
    return found


def load() -> None:
    """Import every module of the table; each registers its values with the text parser."""
    for public in MODULES:
        find(public)


def rows(kind: str = "") -> list[Row]:
    """The values of a kind, or of all kinds, in the order of the table."""
    classes = {public: find(public) for public in MODULES}
    return [describe(public, cls) for public, cls in classes.items() if kind in ("", cls.kind)]


def describe(public: str, cls: type[Value]) -> Row:
    """What there is to say of one class, whatever table it stands in."""
    family = _arguments(cls.__bases__[0])
    own = {name: text for name, text in _arguments(cls).items() if family.get(name) != text}
    inherited = [text for name, text in family.items() if name not in own]
    signature = f"{cls.name}({', '.join(own.values())})"
    return Row(
        cls.kind, cls.name, public, signature, ", ".join(inherited), _first_sentence(cls.__doc__ or "")
    )


def _arguments(cls: type[Value]) -> dict[str, str]:
    """By name, `name=default` as in a text; the name alone where there is no default."""
    fields = dataclasses.fields(cls)
    return {field.name: _argument(field.name, field.default) for field in fields}


def _argument(name: str, default: object) -> str:
    if default is dataclasses.MISSING:
        return name
    return f'{name}="{default}"' if isinstance(default, str) else f"{name}={default}"


def _first_sentence(text: str) -> str:
    """Up to the first full stop that a blank and no small letter, or nothing, follows; "et al." ends no sentence."""
    flat = " ".join(text.split("\n\n")[0].split())
    end = re.search(r"(?<!et al)\.(?= [^a-z]|$)", flat)
    return flat[: end.end()] if end else flat
