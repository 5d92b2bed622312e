"""`mpitrain train --threads` as a process, one that cannot import MPI: what it prints, and how it ends."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    command = [sys.executable, "-c", WITHOUT_MPI, *words]
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
    done = run(digits, "train", "digits.py", "--threads", "4", "--run-dir", "run", "--quiet")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("FOM ") and " workers=4 " in done.stdout and " threads=4 " in done.stdout
    result = json.loads((digits / "run" / "result.json").read_text())
    assert result["status"] == "ok" and result["metrics"]["accuracy"] >= 0.97
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
