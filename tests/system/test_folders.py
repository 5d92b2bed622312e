"""A run's folders are for its owner alone, whoever makes them."""

import os
import stat
from pathlib import Path

import pytest
import torch

from mpitrain.checkpoint.parts import folder_of, write_part
from mpitrain.cli.main import main
from mpitrain.errors import UsageError
from mpitrain.reporting.report import Report, Reported
from mpitrain.system.files.folders import make_private
from mpitrain.system.files.run_directory import Identity
from mpitrain.training.watchdog.alarm_files import Alarm


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_run_directory_that_was_moved_away_comes_back_closed(tmp_path):
    """Whatever is written next makes it anew."""
    for number, write in enumerate(
        (
            lambda run: write_part(
                folder_of(run, 5), "worker-0", {"w": torch.zeros(2)}, Identity("run", "attempt")
            ),
            lambda run: Alarm(run, 0, 1).raise_alarm(),
            lambda run: Report(Reported(run, 10, quiet=True)).close(),
        )
    ):
        run = tmp_path / "runs" / str(number)
        write(run)
        made = [run, *(path for path in run.rglob("*") if path.is_dir())]
        assert {mode(path) for path in made} == {0o700}, made


def test_what_is_there_keeps_its_permissions(tmp_path):
    (tmp_path / "run").mkdir(mode=0o750)
    before = mode(tmp_path / "run")
    make_private(tmp_path / "run", "errors")
    assert mode(tmp_path / "run") == before and mode(tmp_path / "run" / "errors") == 0o700


def test_the_names_of_new_folders_survive_a_power_cut(tmp_path, monkeypatch):
    """Their parents are fsynced, by whoever makes them and nobody else."""
    synced, fsync = [], os.fsync

    def spy(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    run = tmp_path / "run"
    make_private(run, "checkpoints", "000000000008")
    assert synced == [str(tmp_path), str(run), str(run / "checkpoints")]
    make_private(run, "checkpoints", "000000000008")
    assert len(synced) == 3


def test_the_umask_says_who_may_read_where_it_is_asked_to(tmp_path, monkeypatch):
    monkeypatch.setenv("MPITRAIN_RUN_FOLDERS", "umask")
    before = os.umask(0o027)
    try:
        made = make_private(tmp_path / "run", "checkpoints")
    finally:
        os.umask(before)
    assert mode(tmp_path / "run") == mode(made) == 0o750
    monkeypatch.setenv("MPITRAIN_RUN_FOLDERS", "group")
    with pytest.raises(
        UsageError, match="MPITRAIN_RUN_FOLDERS=group is not known; set it to private or umask"
    ):
        make_private(tmp_path / "other")


def test_a_run_that_one_may_not_read_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    """Root may read everything."""
    run = make_private(tmp_path / "run")
    monkeypatch.setattr(os, "access", lambda path, asked: Path(path) != run)
    for words in (["report", str(run)], ["export", str(run), "--fp16", "-o", str(tmp_path / "m.pt2")]):
        assert main(words) == 2
        told = capsys.readouterr().err
        assert f"{run} may not be read by you" in told and "MPITRAIN_RUN_FOLDERS=umask" in told, told
        assert len(told.splitlines()) == 1
