"""Some of these fail, in every way: for the test of what runs cases."""

import os
import signal
import sys
import time

from tests.mpi.cases import run_cases, starts

seen = []


@starts
def case_that_starts(rt):
    seen.append("started")


def case_that_passes(rt):
    assert seen == ["started"]


def case_that_raises_on_one_rank(rt):
    assert rt.rank != 1, "planted"


def case_that_dies(rt):
    if rt.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def case_behind_them(rt):
    assert seen == ["started"]


def case_that_leaves_with_code_3(rt):
    sys.exit(3)


def case_that_is_last(rt):
    assert seen == ["started"]


if __name__ == "__main__":
    run_cases(globals())
