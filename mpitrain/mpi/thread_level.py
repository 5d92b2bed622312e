"""The thread level at which MPI was started, and one warning where it is not the one that this package asks for.

Invariants: the package asks for SERIALIZED (`bindings.py`), but a program that imports mpi4py first decides otherwise,
and MPI cannot be started again. Above it Open MPI deadlocks when a peer dies. Below it MPI was promised that one thread
alone would call it, and a process group has a second one: it calls while no other thread does, and Open MPI and
MPICH take no locks below MULTIPLE, so to them that is the same; of others nothing is known, and a group is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from mpitrain.errors import UsageError
from mpitrain.mpi.bindings import MPI
from mpitrain.system.launched.node_map import name_ranks

LEVELS = ("single", "funneled", "serialized", "multiple")
_VALUES = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)
_BEARS_A_SECOND_THREAD = ("Open MPI", "MPICH")
_WAY_OUT = (
    'ask for it before mpi4py.MPI is imported, mpi4py.rc.thread_level = "serialized", or in the environment,'
    " MPI4PY_RC_THREAD_LEVEL=serialized"
)


def thread_level() -> str:
    """The name of this process's level."""
    return LEVELS[_VALUES.index(MPI.Query_thread())]


def warn_of_multiple(levels: Sequence[str], library: str) -> None:
    """Warn if ranks were started at MULTIPLE, where that does harm; called on one rank, with the levels of all."""
    if "multiple" in levels and "Open MPI" in library:
        warnings.warn(
            f"MPI was started with THREAD_MULTIPLE on {_name(levels, ['multiple'])} before mpitrain could ask for less;"
            f" with that Open MPI's TCP transport deadlocks when a peer dies. Its level is SERIALIZED: {_WAY_OUT}",
            stacklevel=4,
        )


def check_second_thread(levels: Sequence[str], library: str, warns: bool) -> None:
    """Before a second thread calls MPI: nothing where every rank allows it; else a warning on the rank that `warns`, or
    UsageError on every rank where it is not known to go well."""
    low = ["single", "funneled"]
    if not set(levels) & set(low):
        return
    which = (
        f"MPI was started with THREAD_{'/'.join(level.upper() for level in low if level in levels)} on"
        f" {_name(levels, low)}, which promises it that one thread alone calls it; the process group has a second one"
    )
    if not any(name in library for name in _BEARS_A_SECOND_THREAD):
        raise UsageError(f"{which}. Its level is SERIALIZED: {_WAY_OUT}")
    if warns:
        warnings.warn(
            f"{which}, which calls while no other does. Open MPI and MPICH bear it, but no MPI need: calls of your own"
            f" that run meanwhile may corrupt messages (mpitrain.exclusive_mpi). The level is SERIALIZED: {_WAY_OUT}",
            stacklevel=4,
        )


def _name(levels: Sequence[str], wanted: Sequence[str]) -> str:
    return name_ranks([rank for rank, level in enumerate(levels) if level in wanted], len(levels))
