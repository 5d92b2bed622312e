"""Decisions as data: strategies, and the dampings, codecs, schedules and other values that stand in their texts.

The names come from the table in `registry.py`, and are loaded on first use.
"""

from __future__ import annotations

from typing import Any

from mpitrain.strategies import registry
from mpitrain.values import provide

__all__ = sorted(registry.MODULES)  # noqa: PLE0605

provide(registry.load)


def __getattr__(name: str) -> Any:
    if name not in registry.MODULES:
        raise AttributeError(
            f"module 'mpitrain.strategies' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    value = globals()[name] = registry.find(name)
    return value
