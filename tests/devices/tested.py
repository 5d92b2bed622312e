"""The accelerator that tests marked `gpu` compute on: torch's own, or, where MPITRAIN_TEST_DEVICE says "sim", the
simulated one, on which `make gpu` is rehearsed."""

from __future__ import annotations

import os

from mpitrain.devices import accelerator
from tests.devices import simulated

VARIABLE = "MPITRAIN_TEST_DEVICE"


def is_simulated() -> bool:
    """Whether this is a rehearsal."""
    return os.environ.get(VARIABLE) == simulated.NAME


def kind() -> str | None:
    """What torch calls it; None where there is none. A process that rehearses has loaded the simulated one then."""
    if is_simulated():
        simulated.be_the_same_everywhere()
        simulated.load()
    return accelerator.kind()


def for_ranks() -> dict[str, str]:
    """What ranks, which get a clean environment, have to be told."""
    return {VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ else {}
