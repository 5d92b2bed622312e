"""Runs torch's own tests of `torch.distributed` on ranks that a launcher has already started.

    mpirun -n 2 python tests/torch_suite/programs/torch_tests.py BACKEND GUARDS FOLDER LIMIT_S TEST ...

torch's runner starts fresh processes for every test and gives each its rank. Here the processes exist, and each test
gets fresh default groups instead, which meet by a file, with either backend. GUARDS is the backend whose conditions
("Only gloo backend supports timeouts") decide which tests are skipped: torch decides that once, while the module is
imported. A test that then names gloo gets BACKEND: MPITRAIN_REPLACES is for just that.

Every rank writes one file per test to FOLDER: `TEST.RANK`, a JSON list of outcome and message. A test in which any rank
failed ends the launch, as does one that takes longer than LIMIT_S; whoever started it goes on in another.
"""

import ctypes
import faulthandler
import functools
import json
import os
import sys
import time
import traceback
import unittest
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from mpitrain.system.launched.launch_variables import launched_rank, launched_size
from mpitrain.torch_versions import spans_end_elsewhere
from tests.torch_suite.table import FAIL, PASS, SKIP

ASKS_FOR_THE_NAME = "test_get_backend"  # of the backend that the group has
GRACE_S = 5.0  # from one rank's failure to the end of the launch


def torch_module(guards: str, size: int) -> Any:
    """torch's module of tests, with the conditions of that backend."""
    os.environ.update(BACKEND=guards, WORLD_SIZE=str(size), INIT_METHOD="file:///")
    os.environ.setdefault("MASTER_ADDR", "localhost")
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_distributed

    if size > 2:  # torch skips below 8 ranks what needs 3: its machines have few GPUs
        common_distributed.skip_if_small_worldsize = lambda function: function
    from torch.testing._internal.distributed import distributed_test

    if spans_end_elsewhere():
        for profiled in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
            getattr(distributed_test, profiled).append("mpi4py")  # what torch asks of its own backends' spans
    return distributed_test


def keep_groups() -> None:
    """From now on no process group is ever destroyed (see `benchmarks/measuring/gloo.py`: gloo may hang)."""
    from torch.distributed import distributed_c10d

    make: Any = distributed_c10d._new_process_group_helper

    @functools.wraps(make)
    def kept(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
        return made

    distributed_c10d._new_process_group_helper = kept


def make_suite(module: Any) -> type:
    """torch's tests as a class whose instances run them in this process."""

    class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):
        pass

    return Suite


def run_test(module: Any, backend: str, name: str, folder: Path, ranks: tuple[int, int]) -> tuple[str, str]:
    """What torch's `TestDistBackend._run` does in a process of its own: the outcome on this rank, and why."""
    import torch.distributed as dist
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_distributed import TEST_SKIPS

    rank, size = ranks
    dist.set_debug_level_from_env()  # a test before may have left another
    prepare(module, folder / f"{name}.files")
    module.BACKEND = backend if name == ASKS_FOR_THE_NAME else os.environ["BACKEND"]
    case = make_suite(module)(name)
    case.rank, case.file_name = rank, str(folder / f"{name}.files" / "rendezvous")
    try:
        dist.init_process_group(
            backend,
            f"file://{case.file_name}",
            timedelta(seconds=module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout)),
            world_size=size,
            rank=rank,
        )
        assert dist.get_backend() == backend
        case._barrier(timeout=60)
        common_utils.set_rng_seed(1234)  # what it is by default; before 2.13 one has to say it
        getattr(case, name)()
    except unittest.SkipTest as reason:
        return SKIP, str(reason)
    except SystemExit as end:
        reasons = [skip.message for skip in TEST_SKIPS.values() if skip.exit_code == end.code]
        return (SKIP, reasons[0]) if reasons else (FAIL, f"exit code {end.code}")
    except BaseException:
        return FAIL, traceback.format_exc()
    return PASS, ""


def prepare(module: Any, files: Path) -> None:
    """The folders and the variables that torch's runner sets before it starts a test's processes."""
    for each in ("barrier", "test_dir", "init_dir"):
        (files / each).mkdir(parents=True, exist_ok=True)
    os.environ["TEMP_DIR"] = str(files)
    module.INIT_METHOD = f"file://{files}/init_dir/shared_init_file"
    module.Barrier.barrier_id = 0


def agree(folder: Path, name: str, rank: int, size: int, outcome: tuple[str, str]) -> bool:
    """Write this rank's outcome, wait for the others', and say whether none has failed. Where one has, the others may
    be waiting for it inside the test, and are left there."""
    draft = folder / f".{name}.{rank}"
    draft.write_text(json.dumps(outcome))
    draft.rename(folder / f"{name}.{rank}")
    failed_s = float("inf")
    while True:
        heard = [path for each in range(size) if (path := folder / f"{name}.{each}").exists()]
        failed = any(json.loads(path.read_text())[0] == FAIL for path in heard)
        if failed:
            failed_s = min(failed_s, time.monotonic())
        if len(heard) == size or time.monotonic() > failed_s + GRACE_S:
            return not failed
        time.sleep(0.005)


def leave(destroy: Callable[[], None]) -> None:
    """End all groups of a test; those it has ended itself are gone."""
    try:
        destroy()
    except (AssertionError, ValueError):
        pass


def main() -> NoReturn:
    """Run the tests that the command line names; the process ends without destroying what a test has left."""
    backend, guards, folder, limit_s, *names = sys.argv[1:]
    rank, size = launched_rank(), launched_size()
    if size is None:
        sys.exit("start this under mpirun")
    module = torch_module(guards, size)
    if backend != "gloo":
        os.environ["MPITRAIN_REPLACES"] = "gloo,mpi"
    keep_groups()
    import torch.distributed as dist

    environment = dict(os.environ)
    for name in names:
        faulthandler.dump_traceback_later(float(limit_s), exit=True, file=sys.__stderr__)
        outcome = run_test(module, backend, name, Path(folder), (rank, size))
        if not agree(Path(folder), name, rank, size, outcome):
            break
        leave(dist.destroy_process_group)
        faulthandler.cancel_dump_traceback_later()
        os.environ.clear()
        os.environ.update(environment)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
