"""What torch 2.14's own tests ask of a group that is made anew, asked by our code under torch's names of the methods.

    python fault_tolerance.py gloo|mpi4py FOLDER TEST ...        on 3 ranks, under MPI with ULFM

Each test is a group of its own, made with `enable_reconfigure=True`, and ends at once on all ranks where one rank
fails. A file FOLDER/TEST.RANK holds what came of it: ["pass", ""] or ["skip" or "fail", why].
"""

import faulthandler
import json
import os
import sys
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

LIMIT_S = 30.0
later: Any = dist  # with what torch 2.14 has
kinds: Any = c10d


class Skip(Exception):
    """The test does not apply to this backend."""


class Group:
    """A reconfigurable default group of all ranks, and what the ranks tell one another beside it."""

    def __init__(self, backend: str, store: Any, rank: int, size: int, name: str):
        self.launched, self.size, self.name = rank, size, name
        self.store = dist.PrefixStore(name, store)
        self._num_told = 0
        later.init_process_group(
            backend, store=self.store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S),
            enable_reconfigure=True,
        )  # fmt: skip
        self.backend: Any = later.get_backend_impl(dist.group.WORLD, torch.device("cpu"))
        assert later._supports_reconfigure() and self.backend.supports_reconfigure

    def every(self, text: str) -> list[str]:
        """What each rank says, in the order of the launch."""
        self._num_told += 1
        self.store.set(f"{self._num_told}/{self.launched}", text)
        return [self.store.get(f"{self._num_told}/{rank}").decode() for rank in range(self.size)]

    def handles(self) -> list[str]:
        """Of all ranks, in the order of the launch."""
        return self.every(later._get_reconfigure_handle())

    def make(self, uuid: int, handles: Any) -> None:
        """Make the group anew."""
        later._reconfigure(uuid, handles, timeout=timedelta(seconds=LIMIT_S)).wait()

    def make_of_all(self, uuid: int) -> list[str]:
        """Make the group of all ranks; returns their next handles."""
        self.make(uuid, self.handles())
        self.is_rank(self.launched, self.size)
        return self.handles()

    def make_alone(self, uuid: int) -> None:
        """A group of this rank only; each rank gives a uuid of its own."""
        self.make(uuid + self.launched, [later._get_reconfigure_handle()])
        self.is_rank(0, 1)

    def is_rank(self, rank: int, size: int) -> None:
        """Asserts who this is in the group."""
        assert (dist.get_rank(), dist.get_world_size()) == (rank, size), (
            dist.get_rank(),
            dist.get_world_size(),
        )

    def adds_up(self) -> None:
        """Asserts that an all_reduce works among those who are in the group."""
        tensor = torch.full((4,), dist.get_rank() + 1.0)
        dist.all_reduce(tensor)
        size = dist.get_world_size()
        assert tensor.eq(size * (size + 1) / 2).all(), tensor


def test_reconfigure_basic(group: Group) -> None:
    group.make_of_all(100)


def test_reconfigure_then_all_reduce(group: Group) -> None:
    group.make_of_all(200)
    group.adds_up()


def test_reconfigure_then_send_recv(group: Group) -> None:
    group.make_of_all(300)
    rank, size = dist.get_rank(), dist.get_world_size()
    got = torch.zeros(4)
    calls = [
        lambda: group.backend.send([torch.full((4,), rank + 1.0)], (rank + 1) % size, 0),
        lambda: group.backend.recv([got], (rank - 1) % size, 0),
    ]
    for work in [call() for call in (calls if rank % 2 == 0 else reversed(calls))]:
        work.wait()
    assert got.eq((rank - 1) % size + 1).all(), got


def _exclude(group: Group, uuid: int, excluded: int) -> None:
    handles = group.make_of_all(uuid)
    if group.launched != excluded:
        del handles[excluded]
        group.make(uuid + 1, handles)
        group.is_rank(group.launched - (group.launched > excluded), group.size - 1)
        group.adds_up()
        tensor = torch.full((4,), 42.0 if dist.get_rank() == 0 else 0.0)
        dist.broadcast(tensor, 0)
        assert tensor.eq(42).all()
    group.every("done")


def test_shrink_exclude_last_rank(group: Group) -> None:
    _exclude(group, 400, group.size - 1)


def test_shrink_exclude_middle_rank(group: Group) -> None:
    _exclude(group, 500, group.size // 2)


def test_reconfigure_scale_down_up(group: Group) -> None:
    group.make_alone(600)
    group.make_of_all(610)
    group.make_alone(620)
    group.every("done")


def test_reconfigure_single_to_all(group: Group) -> None:
    group.make_alone(700)
    group.make_of_all(710)
    group.adds_up()


def test_reconfigure_identity(group: Group) -> None:
    group.make(801, group.make_of_all(800))
    group.adds_up()


def _in_parts(group: Group, first: int, second: int | None) -> None:
    half, handles = group.size // 2, group.handles()
    uuid, part = (first, handles[:half]) if group.launched < half else (second, handles[half:])
    if uuid is not None:
        group.make(uuid, part)
    group.make_of_all(first + 50)
    group.adds_up()


def test_reconfigure_late_join(group: Group) -> None:
    _in_parts(group, 900, None)


def test_reconfigure_merge_split(group: Group) -> None:
    _in_parts(group, 1000, 1001)


def test_reconfigure_after_abort(group: Group) -> None:
    group.make_of_all(1200)
    group.backend.abort()
    assert group.backend.get_error() == kinds.ErrorType.SUCCESS
    group.make_of_all(1201)
    group.adds_up()


def test_reconfigure_after_timeout(group: Group) -> None:
    if group.backend.name() == "gloo":
        raise Skip("gloo does not leave a group after a timeout")
    group.make_of_all(1300)
    group.adds_up()
    told = threading.Event()
    group.backend.set_timeout(timedelta(seconds=2))
    group.backend.register_abort_hook(0, told.set)
    if group.launched:
        tensor = torch.ones(4)
        work = dist.all_reduce(tensor, async_op=True)
        assert told.wait(10) and group.backend.get_error() == kinds.ErrorType.TIMEOUT
        try:
            dist.all_reduce(tensor, async_op=True)
            raise AssertionError("a group that has timed out takes another collective")
        except RuntimeError as error:
            assert "timed out" in str(error), error
        del work
    group.backend.unregister_abort_hook(0)
    group.backend.set_timeout(timedelta(seconds=LIMIT_S))
    group.every("seen")
    group.make_of_all(1301)
    group.adds_up()


def test_reconfigure_rejects_reused_uuid(group: Group) -> None:
    group.make_alone(1100)
    try:
        group.make_alone(1100)
        raise AssertionError("a uuid that was used is taken again")
    except RuntimeError as error:
        assert "already used" in str(error), error


def main() -> None:
    """Run the tests that the command line names, each in a group of its own."""
    backend, folder, *names = sys.argv[1:]
    rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
    store = dist.FileStore(f"{folder}/store", size)
    faulthandler.dump_traceback_later(LIMIT_S * (len(names) + 1), exit=True)
    for name in names:
        group = Group(backend, store, rank, size, name)
        try:
            globals()[name](group)
            outcome = ["pass", ""]
        except Skip as why:
            outcome = ["skip", str(why)]
        except Exception:
            outcome = ["fail", traceback.format_exc()]
        Path(folder, f"{name}.{rank}").write_text(json.dumps(outcome))
        if outcome[0] == "fail":
            os._exit(1)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
