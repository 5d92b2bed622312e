"""A job that ends with one of its ranks is started again from a complete checkpoint and ends as if undisturbed.

Two jobs of those that `make chaos` counts by the dozen (`benchmarks/chaos/chaos_relaunch.py`): one is killed while it
writes a checkpoint, one loses its only server under ULFM.
"""

import importlib
import random

import pytest
from safetensors.torch import load_file

from mpitrain import Sync, simulate
from mpitrain.training.job_file import load_job
from tests.ranks import ROOT, find_mpi, needs_open_mpi


@pytest.fixture
def chaos_relaunch(monkeypatch, warm_children):
    find_mpi()
    for folder in ("", "chaos"):
        monkeypatch.syspath_prepend(ROOT / "benchmarks" / folder)
    return importlib.import_module("chaos_relaunch")


def check(row):
    assert (row["killed"], row["restarts"], row["ended"], row["finished"]) == (1, 1, True, True), row
    assert row["resumed_from"] > 0 and row["right"] and row["orphans"] == 0, row


@pytest.mark.extended
def test_killed_while_it_writes_a_checkpoint_a_lockstep_run_keeps_its_bits(
    tmp_path, monkeypatch, chaos_relaunch
):
    """Its bits are those of a simulation of `sync()` that nobody disturbed, momentum included."""
    monkeypatch.setenv("CHAOS_DIR", str(tmp_path))
    monkeypatch.setenv("CHAOS_MOMENTUM", "0.5")
    job = load_job(str(ROOT / "benchmarks" / "chaos" / "relaunch_job.py"))
    whole = simulate(job, Sync(), 2, run_dir=str(tmp_path / "whole"), quiet=True)
    orders = chaos_relaunch.draw_orders("allreduce()", random.Random(3)) | {"CHAOS_VICTIM": "0"}
    wanted = load_file(whole["model"])["weight"]
    row = chaos_relaunch.one_job(tmp_path / "run", "allreduce()", orders, "none", wanted)
    check(row)
    assert (
        row["resumed_from"] >= row["being_written"] - job.data.num_samples // 4
    )  # one interval at most is lost


def test_workers_leave_their_dead_server_and_the_next_launch_takes_every_sample_once(
    tmp_path, chaos_relaunch
):
    needs_open_mpi("loses a server under ULFM")
    strategy = "async(servers=1)"
    orders = chaos_relaunch.draw_orders(strategy, random.Random(1)) | {"CHAOS_VICTIM": "0"}
    check(chaos_relaunch.one_job(tmp_path / "run", strategy, orders, "ulfm", None))
