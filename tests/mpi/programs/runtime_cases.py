"""What ranks tell each other: share, gather, agree, compare, who is where; all without pickle, and without a change to
the user's mpi4py.
"""

import pickle
import sys
from unittest import mock

from mpitrain.errors import AgreedError, DataError, MismatchError
from mpitrain.mpi import json_collectives
from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.runtime import start
from mpitrain.system.launched.launch_variables import launched_rank
from mpitrain.training import session
from tests.mpi.cases import run_cases

# Each rank pretends to a node of its own choice: 0 and 2 share one. (Set before the runtime is made.)
import os  # isort: skip

os.environ["SLURMD_NODENAME"] = "beta" if launched_rank() == 1 else "alpha"

AWKWARD = {
    "none": None,
    "text": "žluťoučký \n kůň",
    "list": [1, 2.5, True],
    "empty": {},
    "large": "x" * 300_000,
}


class Stderr:
    """Collects what this rank prints to sys.stderr meanwhile."""

    def __enter__(self):
        self.text, self._before, sys.stderr = "", sys.stderr, self
        return self

    def __exit__(self, *_):
        sys.stderr = self._before

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def agreed(rt, function):
    """The AgreedError that every rank must raise, and what this rank printed."""
    with Stderr() as err:
        try:
            function()
        except AgreedError as error:
            return error, err.text
    raise AssertionError("nobody left")


def case_start_is_idempotent_and_serialized(rt):
    """One runtime a process; thread level SERIALIZED; Finalize is ours."""
    assert start() is rt
    assert rt.thread_level == "serialized" and MPI.Query_thread() == MPI.THREAD_SERIALIZED
    assert (rt.rank, rt.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert MPI.Comm.Compare(rt.comm, MPI.COMM_WORLD) == MPI.CONGRUENT
    assert rt.fault_tolerance == "none" and "MPI" in rt.library


def case_node_map(rt):
    """Ranks 0 and 2 are on one node, rank 1 on another; nodes are numbered as met."""
    assert rt.nodes == (0, 1, 0) and rt.num_nodes == 2
    assert rt.local_rank == (0, 0, 1)[rt.rank]


def case_share(rt):
    """Rank 0's value, whatever the others hold; empty and large ones too."""
    for value in (AWKWARD, None, 0, "", []):
        assert rt.broadcast(value if rt.rank == 0 else f"ignored {rt.rank}") == value


def case_gather_and_allgather(rt):
    """Values of different lengths, in rank order."""
    mine = {"rank": rt.rank, "text": "y" * (rt.rank * 100_000)}
    wanted = [{"rank": rank, "text": "y" * (rank * 100_000)} for rank in range(rt.size)]
    assert rt.gather(mine) == (wanted if rt.rank == 0 else None)
    assert rt.allgather(mine) == wanted


def case_ranks_at_different_calls_are_told_apart(rt):
    """One rank in a barrier and the others in a share: an error on all that names both, and the next call works."""
    try:
        rt.barrier() if rt.rank == 1 else rt.broadcast(5)
    except MismatchError as error:
        assert "ranks 0, 2: broadcast from rank 0" in str(error) and "rank 1: barrier" in str(error), error
    else:
        raise AssertionError("nobody was told")
    assert rt.broadcast(rt.rank) == 0


def case_collectives_work_beside_a_communication_thread(rt):
    """The same calls, carried by the thread that then owns MPI."""
    rt.engine.start_thread()
    assert rt.allgather(rt.rank) == list(range(rt.size))
    assert rt.broadcast(rt.rank) == 0
    rt.engine.stop()


def case_agree_without_error_returns(rt):
    """All well: nothing happens."""
    with Stderr() as err:
        rt.agree(None)
    assert err.text == ""


def case_agree_reports_once_and_all_leave(rt):
    """Equal errors are told once, with their ranks; the exit code is that of the lowest rank that failed."""
    error, printed = agreed(
        rt, lambda: rt.agree(DataError("no shard matches x") if rt.rank in (0, 2) else None)
    )
    assert error.exit_code == 2
    assert printed == ("mpitrain: ranks 0, 2: DataError: no shard matches x\n" if rt.rank == 0 else "")
    error, printed = agreed(rt, lambda: rt.agree({1: OSError("disk"), 2: DataError("bad")}.get(rt.rank)))
    assert error.exit_code == 1
    if rt.rank == 0:
        assert printed == "mpitrain: rank 1: OSError: disk\nmpitrain: rank 2: DataError: bad\n"
    error, printed = agreed(rt, lambda: rt.agree(DataError("everywhere")))
    assert str(error) == "mpitrain: all ranks: DataError: everywhere"


def case_agree_shows_the_traceback_of_strangers(rt):
    """An error that is not ours brings its traceback; ours say what is wrong by themselves."""

    def fail():
        raise KeyError("planted")

    mine = None
    if rt.rank == 1:
        try:
            fail()
        except KeyError as error:
            mine = error
    _, printed = agreed(rt, lambda: rt.agree(mine))
    assert rt.rank != 0 or ("in fail" in printed and "mpitrain: rank 1: KeyError: 'planted'" in printed), (
        printed
    )


def case_compare(rt):
    """Equal values pass; a difference names field, values and ranks, also deep inside a long text and when absent."""
    same = {"batch": 32, "names": ["a", "b"], "lr": 0.1}
    rt.compare(same)
    error, printed = agreed(rt, lambda: rt.compare({**same, "batch": 64 if rt.rank == 1 else 32}))
    assert error.exit_code == 2
    assert "batch: 32 on ranks 0, 2; 64 on rank 1" in str(error) and "lr" not in str(error)
    assert (str(error) in printed) == (rt.rank == 0)
    text = "layer " * 1000
    error, _ = agreed(rt, lambda: rt.compare({"model": text + ("wide" if rt.rank == 2 else "slim") + text}))
    assert "slim" in str(error) and "wide" in str(error) and len(str(error)) < 600
    error, _ = agreed(rt, lambda: rt.compare(same if rt.rank else {**same, "extra": 1}))
    assert "extra: 1 on rank 0; absent on ranks 1-2" in str(error)


def case_where_all_ranks_agree_no_texts_travel(rt):
    """A flag and a digest, in numbers of 8 bytes: what a rank receives grows neither with the number of ranks nor with
    the texts."""
    sizes = []
    with mock.patch.multiple(json_collectives, allgather=None, gather=None, broadcast=None):
        largest = json_collectives.largest

        def counted(comm, own):
            sizes.append(len(own))
            return largest(comm, own)

        with mock.patch.object(json_collectives, "largest", counted):
            rt.agree(None)
            rt.compare({"parameters": ["weight (64, 64)"] * 1000})
    assert sizes == [1, 8]


def case_one_rank_of_a_node_reads_the_sources(rt):
    """All ranks of the node that run the same files take what the first has found; others look for themselves."""
    reads = []

    def versions():
        reads.append(rt.rank)
        return {"mpitrain": "1"}

    with mock.patch.object(session, "code_versions", versions):
        assert session._versions_by_node(rt) == {"mpitrain": "1"}
        assert len(reads) == (0 if rt.rank == 2 else 1)
        with mock.patch.object(session, "code_places", lambda: [f"/at/{rt.rank}"]):
            assert session._versions_by_node(rt) == {"mpitrain": "1"}
        assert len(reads) == (1 if rt.rank == 2 else 2)


def case_mpi4py_stays_the_users_own(rt):
    """Lowercase calls carry Python objects as they do without us, on every communicator."""
    value = {1: (2, 3), "set": {4}}
    for comm in (MPI.COMM_WORLD, rt.comm):
        assert comm.bcast(value if comm.rank == 0 else None) == value
        assert comm.allgather((comm.rank,)) == [(rank,) for rank in range(comm.size)]


def case_a_pickle_among_our_own_messages_runs_nothing(rt):
    """Our exchanges read JSON: bytes that another rank has pickled are refused, not executed."""

    class Bomb:
        def __reduce__(self):
            return (exec, ("import sys; sys.exploded = True",))

    bomb = pickle.dumps(Bomb())
    pickle.loads(bomb)
    assert sys.exploded  # type: ignore[attr-defined]  # it would go off
    del sys.exploded  # type: ignore[attr-defined]
    try:
        json_collectives.from_bytes(bomb)
    except ValueError:
        assert not hasattr(sys, "exploded")
    else:
        raise AssertionError("unpickled")


def case_where(rt):
    """What error messages start with."""
    step, role = rt.step, rt.role
    rt.role, rt.step = "worker", 41
    assert rt.where() == f"rank {rt.rank} (worker, step 41)"
    rt.role, rt.step = "", -1
    assert rt.where() == f"rank {rt.rank}"
    rt.role, rt.step = role, step


if __name__ == "__main__":
    run_cases(globals())
