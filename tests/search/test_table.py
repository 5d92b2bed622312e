"""Runs beside one another: which columns there are, mean and spread, the best, and every form."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from mpitrain.cli import main as cli
from mpitrain.errors import UsageError
from mpitrain.search.table import as_html, as_text, read_table


def write_run(
    folder: Path, accuracy: float | None, exit_code: int = 0, seed: int = 0, **options: Any
) -> None:
    folder.mkdir(parents=True)
    result = {
        "status": "ok", "exit_code": exit_code, "seed": seed, "strategy": "allreduce()", "samples_per_second": 1000.0,
        "metrics": {} if accuracy is None else {"accuracy": accuracy, "validation_loss": 1 - accuracy},
        "options": {name: value for name, value in options.items() if "." in name}, "target": {},
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))
    given = {name: value for name, value in options.items() if "." not in name}
    (folder / "run.json").write_text(json.dumps({"overrides": {"lr": None, "quiet": True, **given}}))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for number, (lr, seed, accuracy) in enumerate(
        [(0.1, 0, 0.9), (0.1, 1, 0.8), (0.1, 2, 0.7), (0.2, 0, 0.95), (0.2, 1, 0.1), (0.2, 2, 0.6)]
    ):
        write_run(tmp_path / "all" / str(number + 8), accuracy, seed=seed, lr=lr, **{"model.hidden": 4})
    return tmp_path / "all"


def test_columns_are_what_differs(runs: Path) -> None:
    found = read_table([runs])
    assert found.options == [
        "seed",
        "lr",
    ]  # not what all have in common, such as model.hidden and the strategy
    assert found.by is not None and found.by.metric == "validation_loss"
    head, cells = found.of_runs()
    assert head == ["run", "seed", "lr", "validation_loss", "accuracy", "samples/s", "status"]
    assert [row[0] for row in cells] == ["8", "9", "10", "11", "12", "13"]


def test_mean_and_spread_over_seeds(runs: Path) -> None:
    """By hand: 0.9, 0.8, 0.7 have mean 0.8 and sample standard deviation 0.1."""
    found = read_table([runs], "accuracy").of_settings()
    assert found is not None
    head, cells = found
    assert head[:4] == ["lr", "runs", "accuracy mean", "accuracy spread"]
    assert cells[0][:2] == ["0.1", 3] and cells[0][2:4] == pytest.approx([0.8, 0.1])
    assert read_table([runs / "8", runs / "11"]).of_settings() is None


def test_the_best_run_and_the_best_setting_differ(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runs", "best", str(runs), "--metric", "accuracy"]) == 0
    assert capsys.readouterr().out == f"{runs / '11'}\n"
    assert cli.main(["runs", "best", str(runs), "--metric", "accuracy", "--over-seeds"]) == 0
    assert capsys.readouterr().out.split() == [str(runs / name) for name in ("8", "9", "10")]
    assert cli.main(["runs", "best", str(runs), "--metric", "<accuracy"]) == 0
    assert capsys.readouterr().out == f"{runs / '12'}\n"
    assert cli.main(["runs", "best", str(runs), "--metric", "acuracy"]) == 2
    assert "reports accuracy, validation_loss" in capsys.readouterr().err


def test_a_failed_run_is_never_the_best(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 0.5)
    write_run(tmp_path / "b", 0.9, exit_code=1)
    write_run(tmp_path / "c", None, exit_code=1)
    found = read_table([tmp_path], "accuracy")
    assert [row.status for row in found.rows] == ["ok", "failed", "failed"]
    assert found.best()[0].name == "a"
    with pytest.raises(UsageError, match="none of these runs"):
        read_table([tmp_path / "b", tmp_path / "c"], "accuracy").best()


def test_text_fits_80_columns_and_every_form_holds_every_run(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        wide = {f"model.parameter_{letter}": number * 1000 for letter in "abcdefg"}
        write_run(runs / f"wide-{number}", 0.123456789, **wide, init="<b>&x</b>")
    text = as_text(read_table([runs]))
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"model.parameter_{letter}" in text for letter in "abcdefg")
    page = as_html(read_table([runs]))
    assert "<b>" not in page and "&lt;b&gt;&amp;x" in page
    assert cli.main(["runs", "table", str(runs), "--csv", "-"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(lines) == 9 and lines[-1]["accuracy"] == "0.123456789"
    assert lines[0]["run_dir"] == str(runs / "8")
    files = [str(tmp_path / "t.csv"), str(tmp_path / "t.html")]
    assert cli.main(["runs", "table", str(runs), "--csv", files[0], "--html", files[1]]) == 0
    assert Path(files[1]).read_text() == page and len(Path(files[0]).read_text().splitlines()) == 10


def test_a_run_without_a_result_is_not_finished(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 0.5)
    (tmp_path / "b").mkdir()
    row = {"t": 1.0, "event": "validation", "samples": 8, "accuracy": 0.75, "validation_loss": 0.1}
    (tmp_path / "b" / "metrics.jsonl").write_text(json.dumps(row) + '\n{"torn')
    found = read_table([tmp_path])
    assert [(row.status, row.metrics["accuracy"]) for row in found.rows] == [
        ("ok", 0.5),
        ("not finished", 0.75),
    ]
    assert found.best()[0].name == "a"
