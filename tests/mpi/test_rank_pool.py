"""Warm ranks (`tests/rank_pool/`) are what the launcher would have started, one program leaves nothing to the next, and
the server ends with whoever started it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mpitrain
from tests.mpi.cases import PROGRAMS
from tests.rank_pool.pool import HERE, Pool, may_be_warm
from tests.ranks import ROOT, find_mpi, is_intel, run_ranks, warm_environment
from tests.sampling import sampled


def about(tmp_path, **options):
    command = [str(find_mpi()[0]), str(PROGRAMS / "about_itself.py"), "one", "two words"]
    run = run_ranks(1, command, cwd=tmp_path, env={"SOME_VALUE": "of the test"}, **options).check()
    return json.loads(run.stdout)


def test_a_warm_rank_has_all_that_a_cold_one_has_from_its_launcher(tmp_path):
    warm, cold = about(tmp_path), about(tmp_path, warm=False)
    assert warm == cold and warm["argv"] == ["one", "two words"] and warm["environ"]["SOME_VALUE"]


def through_a_shell(tmp_path, setup, pool):
    """What a rank that a shell has started says about itself, and how many warm ranks there were."""
    (ranks := tmp_path / pool).mkdir()
    env = warm_environment({"PYTHONPATH": str(ROOT)}, ranks)
    env["RANK_POOL"] = env["RANK_POOL"] if pool == "warm" else f"{tmp_path}:{tmp_path}:{tmp_path}"
    program = [str(find_mpi()[0]), str(PROGRAMS / "about_itself.py"), "one"]
    command = ["sh", "-c", f'{setup} "$@"', "sh", *program]
    told = json.loads(run_ranks(1, command, cwd=tmp_path, env=env).check().stdout)
    told["environ"].pop("RANK_POOL", None)  # a warm rank's children are cold
    return told, len(list(ranks.iterdir()))


@pytest.mark.parametrize(
    ("setup", "num_warm"),
    [
        ("trap '' INT; ulimit -c 0; ulimit -n 500; umask 7; exec", 1),
        ("export OMP_NUM_THREADS=2; exec", 0),
        ("exec unshare --uts sh -c 'hostname another && exec \"$@\"' sh", 1),
        ("exec unshare --net", 0),
    ],
    ids=["limits", "threads", "host name", "network"],
)
def test_a_rank_is_warm_however_it_was_started_unless_it_would_not_be_the_same(tmp_path, setup, num_warm):
    if "unshare" in setup and os.geteuid() != 0:
        pytest.skip("a namespace of its own needs root")
    warm, cold = (through_a_shell(tmp_path, setup, pool) for pool in ("warm", "cold"))
    assert warm == (cold[0], num_warm) and cold[1] == 0 and warm[0]["argv"] == ["one"]


@pytest.mark.parametrize("mpi", sampled(["openmpi", "mpich"], ["openmpi"]))
def test_nothing_of_a_program_is_left_to_the_next(mpi):
    """MPI is started once a process, so a second program in it could not; a module that it changed is as new."""
    program = (
        "import os, torch, torch.distributed as dist, mpitrain, mpitrain.job\n"
        "assert not any(hasattr(place, 'changed') for place in (torch, mpitrain, mpitrain.job))\n"
        "assert 'X' not in os.environ\n"
        "torch.changed = mpitrain.changed = mpitrain.job.changed = os.environ['X'] = 'x'\n"
        "dist.init_process_group('mpi4py')\n"
        "dist.barrier()\n"
        "print(torch.rand(1).item(), dist.get_world_size())\n"
    )
    first, second = (run_ranks(2, program, mpi=mpi).check().stdout for _ in range(2))
    assert first == second


def test_a_program_imports_the_package_that_it_would_find_by_itself(tmp_path):
    """Its `__init__` runs in the rank's own environment; a copy of the package is taken whole."""
    shutil.copytree(Path(mpitrain.__file__).parent, tmp_path / "mpitrain")
    program = (
        "import torch.distributed as dist\n"
        "known = dist.is_backend_available('mpi4py')\n"
        "import mpitrain.options\n"
        "print(known, dist.is_backend_available('mpi4py'), mpitrain.__file__, mpitrain.options.__file__)\n"
    )
    for folder in (Path(mpitrain.__file__).parents[1], tmp_path):
        env = {"PYTHONPATH": str(folder)}
        files = f"{folder}/mpitrain/__init__.py {folder}/mpitrain/options.py"
        assert run_ranks(1, program, env=env).check().stdout == f"True True {files}\n"


def test_a_rank_that_is_killed_ends_the_launch_and_not_the_pool():
    program = "import os, signal, time\nfrom mpi4py import MPI\n{}\ntime.sleep(600)\n"
    die = "MPI.COMM_WORLD.rank == 1 and os.kill(os.getpid(), signal.SIGKILL)"
    warm, cold = (run_ranks(2, program.format(die), warm=warm) for warm in (True, False))
    assert warm.code == cold.code != 0
    named = "SIGNAL: 9" if is_intel() else "signal 9"
    assert named in warm.stdout + warm.stderr and named in cold.stdout + cold.stderr
    assert run_ranks(2, "print('up')\n").check().stdout == "up\nup\n"


def test_a_failing_program_shows_its_traceback_and_its_code():
    failed = run_ranks(1, "def broken():\n    raise ValueError('of the program')\nbroken()\n")
    assert failed.code == 1 and "in broken" in failed.stderr and "ValueError: of the program" in failed.stderr


def test_a_program_ends_with_its_callbacks_and_its_code_and_what_c_still_has_to_write_is_written():
    program = (
        "import atexit, ctypes, sys\nimport mpi4py.MPI\n"
        "atexit.register(print, 'a callback')\nctypes.CDLL(None).printf(b'of C\\n')\nsys.exit(5)\n"
    )
    ended = run_ranks(1, program)
    assert ended.code == 5 and sorted(ended.stdout.splitlines()) == ["a callback", "of C"]


@pytest.fixture(scope="module")
def pool():
    python = find_mpi()[0]
    made = Pool(python, dict(os.environ))
    yield made
    made.close()


def run_alone(pool, folder, text):
    """A client without a launcher."""
    folder.mkdir(exist_ok=True)
    return subprocess.run(pool.client(str(folder), ["-c", text]), capture_output=True, text=True, timeout=60)


@pytest.mark.extended
def test_a_pool_that_has_ended_is_started_again(pool, tmp_path):
    first = run_alone(pool, tmp_path / "ranks", "import os; print(os.getppid())")
    os.kill(int(first.stdout), signal.SIGKILL)
    pool._process.wait()
    second = run_alone(pool, tmp_path / "ranks", "import os; print(os.getppid())")
    assert second.returncode == 0 and second.stdout != first.stdout


def test_a_client_whose_server_cannot_fork_starts_the_program_itself(tmp_path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        command = [
            sys.executable,
            "-I",
            "-S",
            str(HERE / "client.py"),
            str(tmp_path / "socket"),
            str(tmp_path),
        ]
        client = subprocess.Popen([*command, "-c", "import torch; print('up')"], stdout=subprocess.PIPE)
        connection, _ = server.accept()
        while connection.recv(1 << 16)[-1:] != b"}":  # all that it asks
            pass
        connection.close()
        assert client.communicate(timeout=60)[0] == b"up\n" and client.returncode == 0


def test_signals_reach_the_rank_and_its_end_is_the_clients(pool, tmp_path):
    (tmp_path / "ranks").mkdir()
    text = (
        "import signal, time\nsignal.signal(10, lambda *_: exit(7))\nprint('up', flush=True)\ntime.sleep(60)"
    )
    for sent, code in ((signal.SIGUSR1, 7), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -9)):
        client = subprocess.Popen(pool.client(str(tmp_path / "ranks"), ["-c", text]), stdout=subprocess.PIPE)
        assert client.stdout.readline() == b"up\n"
        client.send_signal(sent)
        assert client.wait(30) == code
        assert client.stdout.read() == b""  # it ends when the rank has ended, too
        client.stdout.close()


@pytest.mark.extended
def test_an_idle_pool_uses_no_processor_and_ends_with_who_started_it(tmp_path):
    keeper = (
        "import os, time\nfrom pathlib import Path\nfrom tests.rank_pool.pool import Pool\n"
        "import subprocess, sys\npool = Pool(Path(sys.executable), dict(os.environ))\n"
        f"subprocess.Popen(pool.client({str(tmp_path)!r}, ['-c', 'import time; time.sleep(600)']))\n"
        f"while not os.listdir({str(tmp_path)!r}): time.sleep(0.01)\n"
        "print(pool._process.pid, flush=True)\ntime.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", keeper], stdout=subprocess.PIPE, cwd=ROOT)
    server = int(owner.stdout.readline())
    ticks = used_ticks(server)
    time.sleep(1)
    assert used_ticks(server) - ticks <= 1
    owner.kill()
    owner.wait()
    owner.stdout.close()
    ranks = [int(name) for name in os.listdir(tmp_path)]
    deadline_s = time.monotonic() + 30
    while any(is_alive(pid) for pid in (server, *ranks)):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def used_ticks(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def is_alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_what_a_warm_process_cannot_be_is_started_cold():
    python = Path(sys.executable)
    assert may_be_warm(python, [str(python), "file.py"], {"MPITRAIN_FT": "off"})
    for argv, extra in (
        (["/bin/true", "file.py"], {}),
        ([str(python), "-O", "file.py"], {}),
        ([str(python), "file.py", ":", "-n", "2", str(python), "other.py"], {}),
        ([str(python), "file.py"], {"OMP_NUM_THREADS": "2"}),
    ):
        assert not may_be_warm(python, argv, extra)
