"""`mpitrain report --follow`: what the page of a run says from before it begins until it is over."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpitrain.cli import main as cli
from mpitrain.errors import UsageError
from mpitrain.reporting.pages import curves, following
from mpitrain.reporting.pages.following import follow
from mpitrain.reporting.pages.live import SILENT_S, Life, pace_of
from mpitrain.reporting.run_files import RunFiles, read_runs
from mpitrain.system.files.run_lock import LOCK_FILE

RELOADS = "data-reload="


class Followed:
    """A run that is followed: each of `turns` happens between two pages, and all pages are kept."""

    def __init__(self, run_dir: Path, *turns: Callable[[], Any]):
        self.run_dir, self.out, self.turns, self.now_s = (
            run_dir,
            run_dir.parent / "page.html",
            list(turns),
            0.0,
        )
        self.pages: list[str] = []
        self.code = follow(run_dir, self.out, self._wait, Life(run_dir, lambda: self.now_s))
        self.pages.append(self.out.read_text())

    def _wait(self, seconds: float) -> None:
        self.pages.append(self.out.read_text())
        self.now_s += seconds
        self.turns.pop(0)()


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are tested elsewhere, and take most of the time."""
    monkeypatch.setattr(curves, "both_ways", lambda title, draw: "<svg></svg>")


def begin(run: Path, workers: tuple[int, ...] = (1, 2, 3)) -> None:
    run.mkdir(exist_ok=True)
    (run / "run.json").write_text(
        json.dumps({"servers": [0], "workers": list(workers), "target": {"accuracy": 0.9}})
    )
    write(
        run,
        {"event": "start", "t": 0.0, "job": "<i>digits</i>", "strategy": "async()", "workers": len(workers)},
    )
    hold(run)


def hold(run: Path, **holder: object) -> None:
    """The lock, of a process from elsewhere unless said; each time as if touched anew."""
    (run / LOCK_FILE).write_text(json.dumps({"host": "elsewhere", "pid": 1} | holder))
    hold.touched = getattr(hold, "touched", 0) + 1  # type: ignore[attr-defined]
    os.utime(run / LOCK_FILE, (hold.touched, hold.touched))  # type: ignore[attr-defined]


def write(run: Path, *rows: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"time": "2026-11-27 10:00:00"} | row) + "\n" for row in rows)


def train(run: Path, since: int = 0, at_s: float = 40.0) -> None:
    """Half of 1000 samples, 10 a second, from `at_s` on."""
    training = {"event": "training", "t": at_s, "samples": since, "total_samples": 1000, "epochs": 4}
    rows = [
        {
            "event": "progress",
            "t": at_s + one,
            "step": one,
            "epoch": 2,
            "samples": 10 * one,
            "loss": 1.0 / one,
        }
        for one in range(since // 10 + 1, 51)
    ]
    write(run, training, *rows)
    hold(run)


def end(run: Path, **result: object) -> None:
    ended = {"status": "ok", "exit_code": 0, "metrics": {"accuracy": 0.95}, "target": {"accuracy": 0.9}}
    (run / "result.json").write_text(json.dumps(ended | result))
    (run / LOCK_FILE).unlink()


def test_a_run_is_followed_from_before_it_begins_until_it_has_ended(tmp_path: Path) -> None:
    run = tmp_path / "<b>run"
    lost = {"event": "worker lost", "t": 91.0, "rank": 2, "how": "died"}
    validation = {"event": "validation", "t": 87.0, "epoch": 1, "samples": 480, "accuracy": 0.5}
    checkpoint = {
        "event": "checkpoint",
        "t": 88.0,
        "samples": 480,
        "folder": str(run / "checkpoints" / f"{480:012d}"),
    }

    def lose() -> None:
        train(run)
        write(run, validation, checkpoint, lost)

    found = Followed(run, lambda: begin(run), lose, lambda: end(run))
    nothing, started, half, last = found.pages
    assert "does not exist yet" in nothing and ">starting<" in started and found.code == 0
    assert ">running<" in half and "<b>50 %</b>" in half and "epoch 2 of 4" in half
    assert "<b>50 s</b>" in half and "<b>10</b>" in half, (
        "500 samples at 10 a second, without the 40 s before"
    )
    assert "In: 2 of 3 workers and 1 server." in half and "Lost: rank 2 (died, at 91 s)." in half
    assert f"Last checkpoint: of 480 samples (checkpoints/{480:012d}), 3 s before" in half
    assert "<b>0.5</b><small>to be at least 0.9<" in half
    assert all(RELOADS in one for one in found.pages[:3]) and RELOADS not in last
    assert ">target met<" in last and "Target met: accuracy 0.95 is at least 0.9" in last
    assert all("<b>run" not in one and "<i>digits" not in one for one in found.pages)


def test_a_resumed_run_counts_what_its_last_start_does(tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin(run)
    train(run)
    paused = {"status": "requeue", "exit_code": 75, "metrics": {}}

    def go_on() -> None:
        (run / "result.json").unlink()
        begin(run)
        write(run, {"event": "training", "t": 5.0, "samples": 500, "total_samples": 1000, "epochs": 4})

    def step() -> None:
        write(run, {"event": "progress", "t": 6.0, "step": 60, "epoch": 3, "samples": 600, "loss": 0.1})
        hold(run)

    found = Followed(run, lambda: end(run, **paused), go_on, step, lambda: end(run))
    assert ">interrupted<" in found.pages[1] and RELOADS in found.pages[1], "it is waited for"
    assert (
        "<b>60 %</b>" in found.pages[3] and "<b>4 s</b>" in found.pages[3] and "<b>100</b>" in found.pages[3]
    )
    assert found.code == 0 and RELOADS not in found.pages[4]


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_dead_run_is_said_to_be_gone(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    begin(run)
    train(run)
    turns = []
    if where == "here":
        monkeypatch.setattr("mpitrain.system.files.run_lock._is_alive", lambda holder: False)
    else:
        turns = [lambda: None] * round(SILENT_S / 5 + 1)
    found = Followed(run, *turns)
    assert found.code == 0 and len(found.pages) == (1 if where == "here" else round(SILENT_S / 5 + 1))
    last = found.pages[-1]
    assert (
        RELOADS not in last and ">gone without a result<" in last and "No process works on this run" in last
    )
    assert all(">running<" in one for one in found.pages[:-1])


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_run_that_begins_or_ends_while_it_is_looked_at_is_not_gone(
    tmp_path: Path, is_interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins just before its rows are read, and ends just after that."""
    run, read = tmp_path / "run", following.read

    def between(run_dir: Path) -> RunFiles | None:
        if not run.exists():
            begin(run)
            return read(run_dir)
        found = read(run_dir)
        if not (run / "result.json").exists():
            end(run)
        return found

    monkeypatch.setattr(following, "read", between)
    found = Followed(run, *([interrupt] if is_interrupted else [lambda: None] * 2))
    assert all(">starting<" in one for one in found.pages[:2]) and found.code == 130 * is_interrupted
    assert len(found.pages) == 2 if is_interrupted else ">target met<" in found.pages[2]


def test_without_locks_a_run_lives_while_rows_are_written(tmp_path: Path) -> None:
    """By whatever clock its file system dates them."""
    run = tmp_path / "run"
    begin(run)
    (run / LOCK_FILE).unlink()
    os.utime(run / "metrics.jsonl", (1, 1))

    def go_on() -> None:
        train(run)
        (run / LOCK_FILE).unlink()
        os.utime(run / "metrics.jsonl", (2, 2))

    found = Followed(run, go_on, *[lambda: None] * 50)
    assert ">starting<" in found.pages[0] and ">running<" in found.pages[1]
    assert ">gone without a result<" in found.pages[-1]


def test_the_pace_of_a_run_whose_steps_take_minutes_is_known(tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin(run)
    write(run, {"event": "training", "t": 0.0, "samples": 0, "total_samples": 1000})
    for at in (1, 2):
        write(run, {"event": "progress", "t": 100.0 * at, "step": at, "samples": 200 * at, "loss": 1.0})
        pace = pace_of(read_runs([run])[0])
        assert (pace.rate, pace.left_s) == (2.0, 500.0 - 100 * at)


def test_an_interrupt_leaves_a_page_that_loads_itself_no_more(tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin(run)
    train(run)
    found = Followed(run, interrupt)
    assert found.code == 130 and RELOADS in found.pages[0]
    assert RELOADS not in found.pages[1] and "Nobody follows the run any more" in found.pages[1]
    assert "<b>50 %</b>" in found.pages[1] and not list(tmp_path.glob(".*")), (
        "whole, and nothing is left beside it"
    )


def test_a_row_that_is_being_written_is_not_torn(tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"event": "progress", "t": 1.0, "sam')
    found = Followed(run, lambda: end(run))
    assert "could not be read" not in found.pages[0]


def test_what_cannot_be_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs").mkdir()
    for name in ("a", "b"):
        begin(tmp_path / "runs" / name)
    with pytest.raises(UsageError, match="holds 2 runs; name one, such as .*/a"):
        follow(tmp_path / "runs", tmp_path / "page.html")
    two = [str(tmp_path / "runs" / name) for name in ("a", "b")]
    assert cli.main(["report", "--follow", *two]) == 2
    assert "--follow follows one run" in capsys.readouterr().err
