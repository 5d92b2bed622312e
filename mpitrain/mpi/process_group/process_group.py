"""torch.distributed over any MPI: the backend "mpi4py", a process group whose collectives run on one MPI thread.

Invariants: MPI determines who the ranks are, the group uses no store, and torch's names are complete: what torch asks
of a group is here or in the files that this class is made of (`reductions.py`, `data_movement.py`, `point_to_point.py`,
`answers.py`, on `base.py`; `backend_inside.py` for torch 2.14 and later). A collective returns at once with a Work and
is carried out by the process's communication thread (`engine.py`) when all ranks have issued it
(`collective_queue.py`), so DDP's buckets travel while the rest of the backward pass computes. An error inside a
collective, a difference between the ranks or a passed timeout is raised where its Work or future is waited for, in
DDP's C++ too.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from mpitrain.errors import AgreedError, UsageError
from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.process_group import backend_inside
from mpitrain.mpi.process_group.answers import Answers
from mpitrain.mpi.process_group.data_movement import DataMovement
from mpitrain.mpi.process_group.point_to_point import PointToPoint
from mpitrain.mpi.process_group.reductions import Reductions
from mpitrain.mpi.process_group.shared_store import SharedStore, connecting, served
from mpitrain.mpi.runtime import Runtime, start, start_part, started
from mpitrain.system.interrupts import whole
from mpitrain.torch_backend import BACKEND
from mpitrain.torch_versions import innermost_store, name_and_store, set_store

_kept: SharedStore | None = None  # torch's C++ holds the half of it that is C++'s own


def init_default_group(runtime: Runtime, members: Sequence[int] | None = None) -> None:
    """Make the default torch.distributed group of all ranks; from here on a communication thread owns MPI.

    Args:
        members: of the group, in the order of torch's ranks, where some ranks stay outside. All ranks call this.
    """
    ranks = tuple(range(runtime.size) if members is None else members)
    if len(ranks) < runtime.size:
        runtime.torch_ranks, runtime.some_have_groups = ranks, True
    if runtime.rank in ranks:
        dist.init_process_group(
            BACKEND, store=dist.HashStore(), rank=ranks.index(runtime.rank), world_size=len(ranks)
        )


@contextlib.contextmanager
def default_group(runtime: Runtime) -> Iterator[None]:
    """`init_default_group` for the length of a `with`; after it, and after an error that all ranks have agreed on, the
    caller owns MPI again and may make another, as after any error where there is one rank. Any other error ends the
    job."""
    try:
        with whole():
            init_default_group(runtime)
        yield
    except BaseException as error:
        if isinstance(error, AgreedError) or runtime.is_alone:
            leave_default_group(runtime)
        raise
    leave_default_group(runtime)


def leave_default_group(runtime: Runtime) -> None:
    """The caller owns MPI again, also where the group was not made."""
    with whole():
        if dist.is_initialized():
            dist.destroy_process_group()
        runtime.engine.stop()


def rendezvous() -> dict[str, Any]:
    """What `init_process_group` needs to know, from MPI. The group uses no store; scripts may, and share it.

    Where RANK and WORLD_SIZE are set (torchrun's names), they name the ranks; where not, they are set, with LOCAL_RANK
    and LOCAL_WORLD_SIZE, for scripts that ask. Raises UsageError if they do not fit what MPI started.
    """
    runtime = start()
    given = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    rank, size = (int(text) if text is not None and text.isdigit() else None for text in given)
    store, place = served(runtime) if runtime.rank == 0 and runtime.size > 1 else (None, None)
    every = runtime.allgather([rank, size, place])
    shared = _shared_store(runtime, store, every[0][2])
    if all(each[:2] == [None, None] for each in every):
        _export_ranks(runtime)
        return {"store": shared, "rank": runtime.rank, "world_size": runtime.size}
    if any(each[1] != runtime.size for each in every) or {each[0] for each in every} != set(
        range(runtime.size)
    ):
        raise UsageError(
            f"RANK={given[0]} WORLD_SIZE={given[1]} in the environment of rank {runtime.rank}, but MPI started"
            f" {runtime.size} rank(s): start the ranks by mpirun or srun instead of torchrun, or unset the variables"
        )
    return {"store": shared, "rank": rank, "world_size": size}


def _shared_store(runtime: Runtime, store: dist.Store | None, place: Any) -> dist.Store:
    global _kept
    if place is None:
        return dist.HashStore()
    _kept = SharedStore(lambda: dist.PrefixStore(place[2], store or connecting(runtime, place)))
    return _kept


def rendezvous_by_mpi() -> Iterator[tuple[dist.Store, int, int]]:
    """What torch's `rendezvous` yields for init_method="mpi://", for any backend."""
    runtime = start()
    yield _serve_store(runtime), runtime.rank, runtime.size


def _serve_store(runtime: Runtime) -> dist.TCPStore:
    """Collective: a store that rank 0 serves. It returns when all have reached it: rank 0 may drop it soon, where a
    backend is missing."""
    if runtime.rank == 0:
        store, place = served(runtime)
        runtime.broadcast(place)
    else:
        place = runtime.broadcast(None)
        try:
            store = connecting(runtime, place)
        except RuntimeError as error:
            runtime.agree(error)
            raise
    runtime.agree(None)
    return store


def share_store() -> None:
    """Where the default group is ours, have its store be one that torch's own groups may call from any thread: groups
    of other backends meet there. Collective, where each rank's store was its own."""
    if not dist.is_initialized() or not isinstance(dist.group.WORLD, MpiProcessGroup):
        return
    inner = innermost_store(name_and_store(dist.group.WORLD)[1])
    if isinstance(inner, SharedStore):
        set_store(dist.group.WORLD, dist.PrefixStore("default_pg", inner.connected()))
    elif isinstance(inner, dist.HashStore):
        set_store(dist.group.WORLD, dist.PrefixStore("mpitrain", _serve_store(start())))


def _export_ranks(runtime: Runtime) -> None:
    """Set torchrun's variables, for scripts that read them."""
    values = {
        "RANK": runtime.rank, "WORLD_SIZE": runtime.size, "LOCAL_RANK": runtime.local_rank,
        "LOCAL_WORLD_SIZE": runtime.nodes.count(runtime.nodes[runtime.rank]),
    }  # fmt: skip
    for name, value in values.items():
        os.environ.setdefault(name, str(value))


def create(options: Any, backend_options: Any = None) -> "MpiProcessGroup":
    """The creator that torch.distributed calls, on the members of a new group only."""
    runtime, ranks = ranks_of(options)
    group = _kind(runtime, ranks, options.timeout)
    group.start(options.group_id)
    return group


def ranks_of(options: Any) -> tuple[Runtime, list[int]]:
    """The MPI ranks of a new group, in the order of torch's; the first time MPI is started for it."""
    members = _members_of_a_part(options)
    if members and started() is None:
        start_part(members)
    runtime = start()
    if members and runtime.size > len(members):
        runtime.torch_ranks = tuple(members)
    elif not runtime.torch_ranks or not dist.is_initialized():
        _learn_ranks(runtime, options)
    ranks = [runtime.torch_ranks[rank] for rank in options.global_ranks_in_group] or list(runtime.torch_ranks)
    if options.group_size != len(ranks) or ranks[options.group_rank] != runtime.rank:
        raise UsageError(
            f"torch.distributed was given rank {options.group_rank} of {options.group_size}, but MPI started this"
            f" process as rank {runtime.rank} of {runtime.size}; leave rank and world_size out, or start all by mpirun"
        )
    return runtime, ranks


@contextlib.contextmanager
def creating(kind: "type[MpiProcessGroup]") -> Iterator[None]:
    """The groups that are made inside are of this class."""
    global _kind
    before, _kind = _kind, kind
    try:
        yield
    finally:
        _kind = before


def _members_of_a_part(options: Any) -> list[int]:
    """The MPI ranks of a default group of fewer ranks than MPI has, in the order of torch's; the members alone meet, in
    the store that they were given. Empty for any other group."""
    runtime = started()
    known = runtime or MPI.COMM_WORLD
    size, rank = known.size, known.rank
    if options.global_ranks_in_group or options.group_size >= size:
        return []
    store, timeout = options.store, options.timeout
    if isinstance(innermost_store(store), dist.HashStore):
        if runtime is not None and len(runtime.torch_ranks) == options.group_size:
            return [*runtime.torch_ranks]  # `init_default_group` has named them
        raise UsageError(_no_meeting(options.group_size))
    store.set(f"mpi-rank-{options.group_rank}", str(rank))
    try:
        store.wait([f"mpi-rank-{member}" for member in range(options.group_size)], timeout)
    except RuntimeError as error:
        raise UsageError(
            f"world_size={options.group_size} of {size} MPI ranks: not all of them have come to this group's store "
            f"within {timeout.total_seconds():g} s; give all members one init_method= or store="
        ) from error
    return [int(store.get(f"mpi-rank-{member}")) for member in range(options.group_size)]


def meets_elsewhere(world_size: int) -> bool:
    """Whether a default group of so many ranks, for which no store is given, is of a part of MPI's, which meets at
    torch's MASTER_ADDR.

    Raises:
        UsageError: it is, and there is no such place.
    """
    if not 0 < world_size < (started() or MPI.COMM_WORLD).size:
        return False
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise UsageError(_no_meeting(world_size))
    return True


def _no_meeting(world_size: int) -> str:
    size = (started() or MPI.COMM_WORLD).size
    return (
        f"torch.distributed was given a world of {world_size}, but MPI started {size} ranks: leave rank and world_size "
        "out for a group of all of them; for one of a part give its members one init_method= or store=, where they meet"
    )


def _learn_ranks(runtime: Runtime, options: Any) -> None:
    """Which MPI rank each of torch's ranks is: the identity, unless the user has numbered them otherwise."""
    is_world = not options.global_ranks_in_group and options.group_size == runtime.size
    identity = list(range(runtime.size))
    torch_ranks = runtime.allgather(options.group_rank) if is_world else identity
    is_permutation = sorted(torch_ranks) == identity
    runtime.torch_ranks = tuple(map(torch_ranks.index, identity) if is_permutation else identity)


class MpiProcessGroup(Reductions, DataMovement, PointToPoint, Answers):
    """A process group over some ranks of the world; made by torch.distributed through `create`."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        if backend_inside.IS_KNOWN:
            self._inside = backend_inside.put_into(self)


_kind: type[MpiProcessGroup] = MpiProcessGroup
if backend_inside.IS_KNOWN:
    backend_inside.let_torch_see(MpiProcessGroup)
