"""`mpitrain train --threads` as a process, one that cannot import MPI: what it prints, and how it ends."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.ranks import warm_command

ROOT = Path(__file__).parents[2]
# mpi4py is there, and no MPI library: what a laptop has after `pip install mpitrain`
WITHOUT_MPI = """
import sys

class NoLibrary:
    def find_spec(self, name, path=None, target=None):
        if name == "mpi4py.MPI":
            raise RuntimeError("cannot load MPI library")

sys.meta_path.insert(0, NoLibrary())
from mpitrain.cli.main import main
sys.exit(main())
"""
JOB = """
import os, signal, threading
from tests import toy

class Acting:
    def on_step(self, row):
        if row["step"] == 3:
            {act}

def loss(model, batch):
    if {raises} and threading.current_thread().name == "mpitrain-rank-2":
        raise LookupError("no such column")
    return toy.square_loss(model, batch)

job = toy.make_job(loss=loss, optimizer=toy.adam, epochs={epochs}, log_every=1, callbacks=[Acting()])
"""


def run(folder, *words):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    (ranks := folder / "ranks").mkdir(exist_ok=True)
    command = warm_command(["-c", WITHOUT_MPI, *words], ranks)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def start(folder, act, epochs, *words):
    (folder / "job.py").write_text(JOB.format(act=act, raises=act == "raise", epochs=epochs))
    return run(folder, "train", "job.py", "--threads", "2", "--run-dir", "run", *words)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    shutil.copy(ROOT / "jobs" / "digits.py", folder)
    run(folder, "data", "pack", "digits", "data/digits").check_returncode()
    return folder


def test_digits_are_learnt_by_four_threads_without_an_mpi_library(digits):
    done = run(digits, "train", "digits.py", "--threads", "4", "--epochs", "6", "--run-dir", "run", "--quiet")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("FOM ") and " workers=4 " in done.stdout and " threads=4 " in done.stdout
    result = json.loads((digits / "run" / "result.json").read_text())
    assert result["status"] == "ok" and result["metrics"]["accuracy"] >= 0.93
    assert json.loads((digits / "run" / "env.json").read_text())["mpi"] is None


@pytest.mark.parametrize("text", ["allreduce()", "async(servers=2)"])
def test_a_signal_has_a_checkpoint_written_and_ends_with_75(tmp_path, text):
    done = start(tmp_path, "os.kill(os.getpid(), signal.SIGUSR1)", 4000, "--strategy", text)
    assert done.returncode == 75, done.stderr
    left = json.loads((tmp_path / "run" / "result.json").read_text())
    assert left["status"] == "requeue" and (tmp_path / "run" / "REQUEUE").exists()
    done = start(tmp_path, "pass", 3, "--strategy", text, "--steps", "200", "--resume", "auto")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["status"] == "ok" and 0 < found["resumed_from"] <= left["samples"] < found["samples"]


def test_an_interrupt_ends_cleanly_with_130(tmp_path):
    done = start(tmp_path, "os.kill(os.getpid(), signal.SIGINT)", 4000, "--quiet")
    assert done.returncode == 130 and done.stderr == "mpitrain: interrupted\n"


def test_an_exception_is_shown_once_with_its_replica(tmp_path):
    done = start(tmp_path, "raise", 2, "--strategy", "async()", "--quiet")
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1
    last = done.stderr.splitlines()[-1]
    assert "no such column" in last and "rank 2 (worker" in last


@pytest.mark.extended
def test_a_wheel_trains_digits_where_mpi4py_finds_no_library(tmp_path):
    """A wheel of this repository in an environment of its own, which sees the other packages of this one."""
    shutil.copytree(ROOT / "mpitrain", tmp_path / "source" / "mpitrain")
    for name in ("setup.cfg", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path / "source")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*pip, "-w", str(tmp_path), str(tmp_path / "source")], check=True)
    (wheel,) = tmp_path.glob("mpitrain-*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "fresh")], check=True)
    python = str(tmp_path / "fresh" / "bin" / "python")
    subprocess.run(
        [python, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", str(wheel)], check=True
    )
    (site,) = (tmp_path / "fresh" / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(
        sysconfig.get_path("purelib") + "\n"
    )  # whose own .pth files are not read

    folder = tmp_path / "job"
    folder.mkdir()
    shutil.copy(ROOT / "jobs" / "digits.py", folder)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"MPI4PY_LIBMPI": "/no/such/library", "OMP_NUM_THREADS": "1"}

    def run(*words):
        return subprocess.run(
            [python, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=300
        )

    assert run("-c", "import mpi4py.MPI").returncode == 1 and run("-c", "import mpi4py").returncode == 0
    assert str(tmp_path / "fresh") in run("-c", "import mpitrain; print(mpitrain.__file__)").stdout
    assert run("-m", "mpitrain", "data", "pack", "digits", "data/digits").returncode == 0
    done = run("-m", "mpitrain", "train", "digits.py", "--threads", "4", "--quiet")
    assert done.returncode == 0 and " status=ok " in done.stdout and " threads=4 " in done.stdout, done.stderr
