"""Ranks of a node report in one file: none overwrites another one, and each is heard whatever becomes of the others."""

import json
import os
import signal
from pathlib import Path

import pytest

from mpitrain.system.launched import rank_status
from mpitrain.system.launched.rank_status import RankStatus, read_all
from mpitrain.system.launched.status_slots import SLOT_BYTES, Slot, path_of, read_lines

NUM_RANKS, NUM_WRITES = 8, 200


def child(work) -> int:
    """The number of a process of its own, which does this and ends."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def report(folder: Path, rank: int) -> None:
    slot = Slot(path_of(folder, "", "here"))
    for beat in range(1, NUM_WRITES + 1):
        slot.write(json.dumps(vars(RankStatus(rank, "a", f"{rank}", beat=beat))))


def test_many_ranks_write_one_file_at_once_and_none_is_lost_or_torn(tmp_path):
    pids = [child(lambda rank=rank: report(tmp_path, rank)) for rank in range(NUM_RANKS)]
    seen: dict[int, int] = {}
    while pids:
        for rank, status in read_all(tmp_path).items():
            assert status.process == str(rank) and status.beat >= seen.get(rank, 0)
            seen[rank] = status.beat
        pids = [pid for pid in pids if os.waitpid(pid, os.WNOHANG) == (0, 0)]
    assert {rank: status.beat for rank, status in read_all(tmp_path).items()} == dict.fromkeys(
        range(NUM_RANKS), NUM_WRITES
    )
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size == NUM_RANKS * SLOT_BYTES


def test_a_rank_that_dies_stands_still_and_the_others_are_heard(tmp_path):
    """Whichever came first: no rank writes for another one."""
    for first in range(2):
        folder = tmp_path / str(first)
        folder.mkdir()
        slots = [Slot(path_of(folder, "", "here")) for _ in range(2)]

        def dies(slot=slots[first], rank=first):
            slot.write(json.dumps(vars(RankStatus(rank, "a", "", beat=1))))
            os.kill(os.getpid(), signal.SIGKILL)

        os.waitpid(child(dies), 0)
        for beat in (1, 2, 3):
            slots[1 - first].write(json.dumps(vars(RankStatus(1 - first, "a", "", beat=beat))))
            beats = {rank: status.beat for rank, status in read_all(folder).items()}
            assert beats == {first: 1, 1 - first: beat}


def test_what_outgrows_its_place_is_whole_in_another_one(tmp_path):
    """A rank that knows of a thousand dead."""
    rank_status.open_folder(tmp_path / "of", 1.0, "abc")
    ranks = [rank_status.Reporter(tmp_path / "of", rank) for rank in range(2)]
    for dead in ([], list(range(1000)), [3]):
        for rank in ranks:
            rank.status.dead = dead
            rank.reach(rank_status.READY)
        told = read_all(tmp_path / "of")
        assert [told[rank].dead for rank in range(2)] == [dead, dead]
    late = rank_status.Reporter(tmp_path / "of", 2)
    rank_status.open_folder(tmp_path / "of", 1.0, "def")
    for rank in (ranks[0], late):
        rank.reach(rank_status.READY)
    assert read_all(tmp_path / "of") == {}, "left behind by another start"
    rank_status.remove_folder(tmp_path / "of")
    assert not (tmp_path / "of").exists()


@pytest.mark.parametrize("at", [1, 20, 100])
def test_a_line_that_is_torn_is_none(tmp_path, at):
    path = path_of(tmp_path, "", "here")
    for text in ("x" * 150, "y" * 150):
        Slot(path).write(text)
    torn = bytearray(path.read_bytes())
    torn[at] ^= 1
    path.write_bytes(torn)
    assert list(read_lines(tmp_path, "")) == ["y" * 150]
