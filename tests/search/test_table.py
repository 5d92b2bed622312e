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
    folder: Path, accuracy: float | None, exit_code: int = 0, seed: int = 0, data: str = "", **options: Any
) -> None:
    folder.mkdir(parents=True)
    result = {
        "status": "ok", "exit_code": exit_code, "seed": seed, "strategy": "allreduce()", "samples_per_second": 1000.0,
        "metrics": {} if accuracy is None else {"accuracy": accuracy, "validation_loss": 1 - accuracy},
        "options": {name: value for name, value in options.items() if "." in name}, "target": {},
        "measured_on": data,
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


def test_the_best_is_the_setting_with_the_best_mean_not_the_luckiest_run(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run 11 has 0.95, and the mean of its setting is 0.55; that of the other one is 0.8."""
    assert cli.main(["runs", "best", str(runs), "--metric", "accuracy"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{runs / '8'}\n"
    assert err == "best of 2 settings: accuracy 0.8 +- 0.1 over 3 runs; lr=0.1\n"
    assert cli.main(["runs", "best", str(runs), "--metric", "accuracy", "--over-seeds"]) == 0
    assert capsys.readouterr().out.split() == [str(runs / name) for name in ("8", "9", "10")]
    assert cli.main(["runs", "best", str(runs), "--metric", "<accuracy"]) == 0
    assert capsys.readouterr().out == f"{runs / '11'}\n"
    assert cli.main(["runs", "best", str(runs), "--metric", "acuracy"]) == 2
    assert "reports accuracy, validation_loss" in capsys.readouterr().err


def test_a_failed_run_is_never_the_best(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 0.5)
    write_run(tmp_path / "b", 0.9, exit_code=1)
    write_run(tmp_path / "c", None, exit_code=1)
    found = read_table([tmp_path], "accuracy")
    assert [row.status for row in found.rows] == ["ok", "failed", "failed"]
    assert found.best().runs[0].name == "a" and '<span class="status warn">1 finished<' in as_html(found)
    with pytest.raises(UsageError, match="none of these runs"):
        read_table([tmp_path / "b", tmp_path / "c"], "accuracy").best()


def folds(folder: Path, name: str, *accuracies: float) -> None:
    for number, accuracy in enumerate(accuracies):
        fold = {"fold": f"{number + 1}/{len(accuracies)}", "data": f"part {number}"}
        write_run(folder / f"{name}-{number}", accuracy, lr=name, **fold)


def test_settings_that_were_measured_on_different_data_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fold 3 is the easiest: alone it wins, as part of the whole it does not; and 2 folds are not 3."""
    folds(tmp_path / "a", "good", 0.7, 0.8, 0.9)
    folds(tmp_path / "a", "lucky", 0.1, 0.2, 0.99)
    assert read_table([tmp_path / "a"], "accuracy").best().mean == pytest.approx(0.8)
    write_run(tmp_path / "a" / "half", 0.95, lr="half", fold="1/2", data="half")
    assert cli.main(["runs", "best", str(tmp_path / "a"), "--metric", "accuracy"]) == 2
    assert "measured on 2 different sets of validation data" in capsys.readouterr().err
    assert cli.main(["runs", "best", str(tmp_path / "a" / "good-0"), str(tmp_path / "a" / "lucky-1")]) == 2
    assert cli.main(["runs", "table", str(tmp_path / "a")]) == 0
    assert "note: these runs were measured on 2 different sets" in capsys.readouterr().out
    # a fold that has failed leaves nothing to compare its setting by
    write_run(tmp_path / "b" / "0", 0.9, fold="1/2", data="half", lr=1)
    write_run(tmp_path / "b" / "1", 0.9, fold="2/2", data="other", lr=1, exit_code=1)
    with pytest.raises(UsageError, match="none of these runs has come to its end"):
        read_table([tmp_path / "b"], "accuracy").best()


def test_a_seed_counts_once_over_two_sweeps_and_each_run_says_which_it_is_of(tmp_path: Path) -> None:
    """By hand: seed 0 has 0.5 and 0.7, seed 1 has 0.9: mean of 0.6 and 0.9."""
    write_run(tmp_path / "first" / "0", 0.5)
    write_run(tmp_path / "second" / "0", 0.7)
    write_run(tmp_path / "second" / "1", 0.9, seed=1)
    found = read_table([tmp_path / "first", tmp_path / "second", tmp_path / "second" / "0"], "accuracy")
    assert [row.name for row in found.rows] == ["first/0", "second/0", "second/1"]
    settings = found.of_settings()
    assert settings is not None
    assert settings[1][0][:3] == [2, pytest.approx(0.75), pytest.approx(0.3 / 2**0.5)]


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
    assert found.best().runs[0].name == "a"
