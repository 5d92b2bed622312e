"""With MPITRAIN_RACES=1 the tests of this folder are run with threads that are switched as often as Python can, and
with collections of garbage in between, which let other threads in where nobody expects them."""

import gc
import os
import sys

import pytest


def _let_others_in(phase, info):
    sum(range(50))


@pytest.fixture(autouse=True)
def races():
    if not os.environ.get("MPITRAIN_RACES"):
        yield
        return
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(200, 5, 5)
    gc.callbacks.append(_let_others_in)
    yield
    gc.callbacks.remove(_let_others_in)
    gc.set_threshold(*threshold)
    sys.setswitchinterval(interval)
