"""The libraries that each question of this folder asks, and what was installed of them.

Invariants: standard library only. A library is a program below `libraries/` and, unless our own environment has it, a
file of its name below `environments/`, which `campaign.py` installs without what stands in ours.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from measuring.beside import Beside

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parents[1] / "build" / "opponents"


class Library(NamedTuple):
    """A program below `libraries/`, and what `how` it is told by turns.

    Attributes:
        ours: distributions of our own environment that it runs with.
    """

    program: str
    ways: tuple[Any, ...]
    ours: tuple[str, ...] = ("torch",)


OPPONENTS = {
    "reading": {
        "webdataset": Library("webdataset_tars", (0, 2)),
        "lance": Library("lance_rows", (1, 16, "ranges")),
        "streaming": Library("streaming_shards", (0, 2)),
        "zarr": Library("zarr_chunks", (1, 4)),
        "h5py": Library("h5py_chunks", (1, 4), ("h5py", "torch")),
        "torch": Library("torch_loader", (0, 2), ("h5py", "torch")),
    },
    "sweeps": {
        "optuna": Library("optuna_study", ("random", "halving", "tpe and halving"), ("optuna", "torch")),
        "ray": Library("ray_tune", ("random", "halving")),
    },
    "sparse_tables": {
        "torchrec": Library("torchrec_tables", ("row_wise", "table_wise")),
        "rpc": Library("rpc_tables", ("servers",)),
    },
    "low_communication": {
        "torchft": Library("torchft_rules", ("localsgd", "diloco")),
        "hivemind": Library("hivemind_averaging", ("localsgd",)),
    },
}
NUM_RANKS = {"sparse_tables": 4, "low_communication": 2}  # of the questions that are launched


def start_library(question: str, name: str, settings: Mapping[str, Any], num_processes: int = 1) -> Beside:
    """The processes of a library for a question."""
    folder = ENVIRONMENTS / name
    program = HERE / "libraries" / f"{OPPONENTS[question][name].program}.py"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return Beside(program, settings, folder if folder.exists() else None, num_processes, port)


def in_turns(
    ways: Mapping[str, Callable[[int], Any]],
    rounds: int,
    ready: Callable[[], Any] = lambda: None,
    first: int = 0,
) -> dict[str, list[Any]]:
    """What each way says of every round, told its number; that of round 0 is not kept, and every other round goes
    through them backwards. `ready` is called before each turn; `first`: 1 where there is nothing to warm up."""
    said: dict[str, list[Any]] = {way: [] for way in ways}
    for number in range(first, rounds + 1):
        for way in [*ways][:: 1 if number % 2 else -1]:
            ready()
            answer = ways[way](number)
            if number:
                said[way].append(answer)
    return said


def installed(question: str, name: str) -> list[str]:
    """The versions in the library's environment, or of what our own has of it."""
    found = sorted(path.name.removesuffix(".dist-info") for path in (ENVIRONMENTS / name).glob("*.dist-info"))
    return found or [f"{one}-{version(one)}" for one in OPPONENTS[question][name].ours]
