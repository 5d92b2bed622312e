"""Runs a program of `programs/` on two ranks over one backend, and reads the curves that its ranks printed."""

import json
import math
import socket
from collections.abc import Sequence
from pathlib import Path

from tests.ranks import Result, find_mpi, run_ranks

PROGRAMS = Path(__file__).parent / "programs"
RANKS = 2
Curves = dict[str, list[list[float]]]  # program -> of each rank, its losses
# What torch.distributed's env:// wants, where it is not told that MPI knows.
_BY_ENVIRONMENT = (
    "export RANK=${OMPI_COMM_WORLD_RANK:-$PMI_RANK} LOCAL_RANK=${OMPI_COMM_WORLD_RANK:-$PMI_RANK};"
    'export WORLD_SIZE=%d LOCAL_WORLD_SIZE=%d; exec "$0" "$@"'
)


def run_program(
    program: str, backend: str, mpi: str, *, asks_environment: bool = False, replaces: bool = False,
    arguments: Sequence[str] = (), ranks: int = RANKS, warm: bool = True, timeout_s: float = 240,
) -> Curves:  # fmt: skip
    """What every rank printed, by program.

    Args:
        asks_environment: the program's library looks for ranks and address there: gloo's launch puts them there.
        replaces: the library takes the names of torch's backends only: ours stands for gloo.
        warm: whether the ranks may come from a process that has imported torch, and packages of the tests, before.
    """
    env = {"MPITRAIN_REPLACES": "gloo"} if replaces and backend == "mpi4py" else {}
    argv = [
        str(find_mpi(mpi)[0]),
        str(PROGRAMS / f"{program}.py"),
        "gloo" if replaces else backend,
        *arguments,
    ]
    if asks_environment and backend == "gloo":
        argv = ["sh", "-c", _BY_ENVIRONMENT % (ranks, ranks), *argv]
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    result = run_ranks(ranks, argv, env=env, mpi=mpi, timeout_s=timeout_s, warm=warm).check()
    return _read(result, backend, ranks)


def _read(result: Result, backend: str, ranks: int) -> Curves:
    curves: Curves = {}
    for text in result.ranks_out:
        for line in text.splitlines():
            if line.startswith('{"program"'):
                found = json.loads(line)
                assert found["backend"] == backend, result
                curves.setdefault(found["program"], []).append(found["losses"])
    assert curves and all(len(curve) == ranks for curve in curves.values()), result
    return curves


def farthest(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """The largest relative difference of two programs' losses."""
    assert [len(one) for one in ours] == [len(one) for one in theirs]
    pairs = [pair for one, other in zip(ours, theirs) for pair in zip(one, other)]
    assert all(math.isfinite(loss) for pair in pairs for loss in pair)
    return max(abs(one - other) / abs(other) if one != other else 0.0 for one, other in pairs)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
