"""What `quiet` leaves: nothing of a call from Python, the figure of merit of a command."""

import pytest
import torch

import mpitrain as mt
from mpitrain.cli.main import main
from tests import toy

JOB = "from tests import toy\njob = toy.make_job(validate=toy.Memory(8), epochs=1)\n"


def trained(job, **more):
    mt.train(job, threads=1, **more)


def timed(job, **more):
    for strategy in (mt.Sync(), mt.AllReduce()):
        mt.simulate(job, strategy, timing_only=True, **more)


@pytest.mark.parametrize(("run", "num_lines"), [(trained, 1), (mt.simulate, 1), (timed, 2)])
def test_from_python_nothing_is_printed_and_otherwise_the_figure_of_merit_is(run, num_lines, tmp_path, capfd):
    job = toy.make_job(validate=toy.Memory(8), epochs=1)
    run(job, run_dir=str(tmp_path / "a"), quiet=True)
    assert capfd.readouterr() == ("", "")
    run(job, run_dir=str(tmp_path / "b"))
    assert [line[:4] for line in capfd.readouterr().out.splitlines()] == ["FOM "] * num_lines


@pytest.mark.parametrize("words", ["train --threads 1", "simulate", "simulate --timing-only"])
def test_a_command_prints_one_line_that_suites_read(words, tmp_path, monkeypatch, capfd):
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    assert main([*words.split(), "job.py", "--quiet", "--run-dir", "run"]) == 0
    told = capfd.readouterr()
    assert told.err == "" and told.out.count("\n") == 1 and told.out.startswith("FOM ")


def test_why_a_run_has_failed_is_told_to_the_quiet_too(tmp_path, capfd):
    job = toy.make_job(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e30), epochs=4)
    assert mt.train(job, threads=1, run_dir=str(tmp_path / "run"), quiet=True)["status"] == "fail"
    told = capfd.readouterr()
    assert told.out == "" and "lower the learning rate" in told.err
