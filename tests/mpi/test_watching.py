"""Callbacks and logs of runs under MPI: the rows of `metrics.jsonl`, on rank 0, under every strategy."""

import json
import os
import re

import pytest

from tests.mpi.cases import launch_program
from tests.mpi.start_files import JOB, STRATEGIES
from tests.ranks import ROOT, find_mpi, run_ranks
from tests.reporting.logs import points, rows_of, table

JOB = JOB.replace("batch_size=4", "batch_size=4, epochs=2, validate=toy.Memory()")


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    path = tmp_path_factory.mktemp("watched")
    (path / "job.py").write_text(JOB)
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    arguments = (str(path), json.dumps(STRATEGIES))
    launch_program(3, "watched_runs", *arguments, cwd=path, timeout_s=400, env=env).check()
    return path, json.loads((path / "found.json").read_text())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_callbacks_hear_every_row_on_rank_0_alone(watched, strategy):
    path, found = watched
    run, heard = path / f"run-{STRATEGIES.index(strategy)}", found[strategy]["heard"]
    events = {
        "progress": "on_step",
        "validation": "on_validation",
        "checkpoint": "on_checkpoint",
        "end": "on_validation",
    }
    written = [row for row in rows_of(run) if row["event"] in events]
    assert heard == [[events[row["event"]], row] for row in written] and found[strategy]["others"] == 0
    steps = [row["step"] for row in written if row["event"] == "progress"]
    assert len(steps) >= 6 and steps == sorted(steps)
    assert [row["event"] for row in written].count("validation") == 1 and written[-1]["event"] == "end"
    folders = [row["folder"] for row in written if row["event"] == "checkpoint"]
    assert folders and folders == sorted(folders)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_table_holds_the_same_rows(watched, strategy):
    path, found = watched
    rows = [row for _, row in found[strategy]["heard"]]
    in_table = table(path / f"run-{STRATEGIES.index(strategy)}")
    assert [(row["event"], float(row["samples"])) for row in in_table] == [
        (row["event"], float(row["samples"])) for row in rows
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tensorboards_own_reader_finds_every_point(watched, strategy):
    path, found = watched
    run = path / f"run-{STRATEGIES.index(strategy)}"
    rows = [row for name, row in found[strategy]["heard"] if name == "on_step"]
    losses = points(run, "train/loss")
    assert [step for step, _ in losses] == [row["samples"] for row in rows]
    assert [value for _, value in losses] == pytest.approx([row["loss"] for row in rows])
    validations = [row for name, row in found[strategy]["heard"] if name == "on_validation"]
    assert points(run, "validation/validation_loss") == [
        (row["samples"], pytest.approx(row["validation_loss"])) for row in validations
    ]
    assert {"train/samples_per_second", "train/step", "train/epoch"} <= set(points(run, ""))


def test_a_resumed_run_appends_and_repeats_no_step(watched):
    path, found = watched
    first, second = (
        [row for name, row in found[key]["heard"] if name == "on_step"] for key in ("first", "second")
    )
    assert [row["step"] for row in first] == [1, 2, 3] and [row["step"] for row in second] == [3, 4, 5, 6]
    samples = [12, 24, 36, 48, 60, 72]
    in_table = [row for row in table(path / "goes-on") if row["event"] == "progress"]
    assert [int(row["samples"]) for row in in_table] == samples
    losses = points(path / "goes-on", "train/loss")
    assert [step for step, _ in losses] == samples
    assert [value for _, value in losses[2:]] == pytest.approx([row["loss"] for row in second])


FAILS = (
    JOB
    + """
import dataclasses

class Wrong:
    def on_step(self, row):
        if row["step"] == 3:
            raise RuntimeError("a callback of mine")

job = dataclasses.replace(job, callbacks=[Wrong()])
"""
)


@pytest.mark.parametrize(("strategy", "role"), [("allreduce()", "worker"), ("async()", "server")])
def test_an_exception_in_a_callback_is_the_users_and_ends_the_run(tmp_path, strategy, role):
    (tmp_path / "job.py").write_text(FAILS)
    python = str(find_mpi()[0])
    command = [
        python,
        "-m",
        "mpitrain",
        "train",
        str(tmp_path / "job.py"),
        "--strategy",
        strategy,
        "--log-every",
        "1",
    ]
    run = run_ranks(
        2, [*command, "--run-dir", str(tmp_path / "run")], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}
    )
    assert run.code == 1
    said = re.findall(r"^\[rank \d+\] (mpitrain: .*)", run.stderr, re.MULTILINE)
    assert len(said) == 1 and said[0].startswith(f"mpitrain: rank 0 ({role}, step"), run
    assert said[0].endswith("RuntimeError: a callback of mine")
    assert "job.py" in run.stderr and not (tmp_path / "run" / "result.json").exists()
