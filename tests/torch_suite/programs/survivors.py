"""Ranks of a group one of which is killed at a random moment; the others make the group anew and go on.

    python survivors.py gloo|mpi4py FOLDER VICTIM AFTER_S SIZES        on 3 ranks or more, under MPI with ULFM

All ranks add up tensors of SIZES elements (a comma between two), one after the other, over and over; rank VICTIM is
killed AFTER_S seconds after the first step. Each survivor writes FOLDER/RANK: what it met, when (seconds since the
death) it met the error, had the new group, and had its first sum there.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT_S = 30.0
later: Any = dist  # with what torch 2.14 has


def make(store: Any, ranks: list[int], rank: int, uuid: int) -> None:
    """Make the group of these ranks, who leave their handles in the store."""
    store.set(f"{uuid}/{rank}", later._get_reconfigure_handle())
    handles = [store.get(f"{uuid}/{each}").decode() for each in ranks]
    later._reconfigure(uuid, handles, timeout=timedelta(seconds=LIMIT_S)).wait()


def add(num_elements: int) -> None:
    """One sum, whose value is checked."""
    tensor = torch.full((num_elements,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    size = dist.get_world_size()
    assert tensor.eq(size * (size + 1) / 2).all(), tensor


def die(folder: Path) -> None:
    """The end of this process, with its moment in a file."""
    (folder / "death.new").write_text(str(time.monotonic()))
    (folder / "death.new").rename(folder / "death")
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """See above."""
    backend, place, victim, after_s, sizes = sys.argv[1:]
    folder, counts = Path(place), [int(count) for count in sizes.split(",")]
    rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
    faulthandler.dump_traceback_later(4 * LIMIT_S, exit=True)
    store: Any = dist.FileStore(f"{folder}/store", size)
    later.init_process_group(
        backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size,
        timeout=timedelta(seconds=LIMIT_S), enable_reconfigure=True,
    )  # fmt: skip
    make(store, list(range(size)), rank, 1)
    add(1)
    if rank == int(victim):
        threading.Timer(float(after_s), die, [folder]).start()
    try:
        while True:
            for count in counts:
                add(count)
    except RuntimeError as error:
        met_s, text = time.monotonic(), f"{type(error).__name__}: {error}"
    living = [each for each in range(size) if each != int(victim)]
    make(store, living, rank, 2)
    made_s = time.monotonic()
    add(counts[0])
    went_on_s = time.monotonic()
    for _ in range(20):
        for count in counts:
            add(count)
    pair = dist.new_group([1, 0])  # beside a dead rank
    if dist.get_rank() < 2:
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=pair)
        assert tensor.eq(2).all(), tensor
    death_s = float((folder / "death").read_text())
    times_s = [round(moment_s - death_s, 4) for moment_s in (met_s, made_s, went_on_s)]
    (folder / str(rank)).write_text(json.dumps([text[:200], *times_s]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
