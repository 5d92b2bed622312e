"""A group of a part of MPI's ranks, made of its members alone; and processes that are forked from a rank."""

import argparse
import re
import socket

import pytest

from mpitrain.errors import MismatchError, UsageError
from mpitrain.mpi.engine import collective_queue
from mpitrain.mpi.engine.collective_queue import PendingCollective
from mpitrain.mpi.operation import Op
from tests.mpi.cases import launch_program


@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.extended)])
def test_members_meet_alone_and_a_child_of_theirs_is_refused(tmp_path, mpi):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    run = launch_program(3, "parts_and_children", str(tmp_path), port, mpi=mpi).check()
    assert [out.strip() for out in run.ranks_out] == ["apart", "together", "together"]


def test_a_part_without_a_place_to_meet_is_refused_with_the_way_out(monkeypatch):
    from mpitrain.mpi.process_group import process_group

    monkeypatch.setattr(process_group, "started", lambda: argparse.Namespace(size=3))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert [process_group.meets_elsewhere(size) for size in (0, 3, 4)] == [False] * 3
    with pytest.raises(UsageError, match="a world of 2, but MPI started 3 ranks.*init_method= or store="):
        process_group.meets_elsewhere(2)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert process_group.meets_elsewhere(2)


class Silent:
    """A communicator on which one rank has called something else, and then says nothing."""

    size, rank = 2, 0

    def Iprobe(self, source, tag):
        return False

    def Iallgather(self, own, every):
        return self

    def Test(self):
        return False


def test_ranks_that_differ_are_not_waited_for_for_ever(monkeypatch):
    """One of them may have died since, or be the child of a rank of another package."""
    monkeypatch.setattr(collective_queue, "AGREEMENT_S", 0.05)
    collective = PendingCollective(Op("collective"), lambda may_block: None, "all_reduce of 3", 0)
    collective.make_arrival(Silent()).done = True
    with pytest.raises(MismatchError, match=re.escape("this one all_reduce of 3, and within 0.05 s not all")):
        collective.check(Silent())
