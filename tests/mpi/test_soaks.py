"""What is done often in one process leaves nothing behind of memory, files, threads and shared memory."""

import json

import pytest

from tests.mpi.cases import launch_program

# How often it is done between the two looks, and the most bytes that may stay of each: less than any object that is
# kept by mistake would come to with what it holds.
CASES = {"pushes": (3, 500, 1_000), "trainings": (3, 66, 10_000), "groups": (2, 20, 10_000)}


@pytest.mark.extended
@pytest.mark.parametrize("case", CASES)
def test_what_is_done_often_leaves_nothing_behind(tmp_path, case):
    ranks, times, most_bytes = CASES[case]
    ended = launch_program(ranks, "soaks", case, str(tmp_path), timeout_s=500)
    ended.check()
    looks = [json.loads(text.splitlines()[-1]) for text in ended.ranks_out]
    for before, after in looks:
        assert after["bytes"] - before["bytes"] < times * most_bytes, (before, after)
        for what in ("files", "threads", "tasks", "mapped", "shared"):
            assert after[what] <= before[what], (what, before, after)
