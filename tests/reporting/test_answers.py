"""What a page says first of several runs: which is best, by how much, whether that can be told, and their names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mpitrain.reporting.pages.answers import answer, names_of, seconds_text
from mpitrain.reporting.pages.figures import compact, count_text
from mpitrain.reporting.pages.html_page import Key, Number, keys, table
from mpitrain.reporting.pages.look import STYLE
from mpitrain.reporting.run_files import RunFiles, read_runs
from mpitrain.search.table import read_table


def runs_of(folder: Path, *those: dict[str, Any]) -> list[RunFiles]:
    """Finished runs of these accuracies, options and so on."""
    for number, one in enumerate(those):
        run = folder / str(number)
        run.mkdir()
        options = {name: one[name] for name in ("lr", "seed", "batch_size") if name in one}
        (run / "run.json").write_text(json.dumps({"overrides": options}))
        result = {
            "status": "ok",
            "exit_code": 0,
            "seed": one.get("seed", 0),
            "strategy": "sync()",
            "metrics": one["metrics"],
        }
        result |= {
            name: one[name]
            for name in ("batch_size", "samples_per_second", "target", "strategy_asked")
            if name in one
        }
        (run / "result.json").write_text(json.dumps(result | one.get("result", {})))
    return read_runs([folder])


def accuracy(value: float, lr: float, seed: int = 0, **more: Any) -> dict[str, Any]:
    return {"metrics": {"accuracy": value}, "lr": lr, "seed": seed, **more}


def test_runs_are_called_by_what_differs(tmp_path: Path) -> None:
    runs = runs_of(
        tmp_path, accuracy(0.5, 1e-3, batch_size=16), accuracy(0.5, 3e-3, batch_size=16),
        accuracy(0.5, 3e-3, batch_size=64), accuracy(0.5, 3e-3, batch_size=64),
    )  # fmt: skip
    names = ["lr 0.001, batch 16", "lr 0.003, batch 16", "lr 0.003, batch 64 (2)", "lr 0.003, batch 64 (3)"]
    assert names_of(runs) == names and names_of(runs[:1]) == ["0"]
    assert names_of([runs[2], runs[3]]) == ["2", "3"], "nothing differs"


RUNS = {
    "one run each": (
        [accuracy(0.9, 0.1), accuracy(0.95, 0.2)],
        "Best: lr 0.2, with accuracy 0.95.",
        "That is 0.05 higher than the next, lr 0.1 (0.9). Of one run each, so whether another seed would change",
    ),
    "told apart": (
        [accuracy(0.9, 0.1, 1), accuracy(0.91, 0.1, 2), accuracy(0.95, 0.2, 1), accuracy(0.96, 0.2, 2)],
        "Best: lr 0.2, with accuracy 0.955 +- 0.0071 over 2 runs.",
        "That is 0.05 higher than the next, lr 0.1 (0.905 +- 0.0071 over 2 runs), more than twice what the seeds",
    ),
    "not told apart": (
        [accuracy(0.9, 0.1, 1), accuracy(0.95, 0.1, 2), accuracy(0.92, 0.2, 1), accuracy(0.96, 0.2, 2)],
        "Best: lr 0.2, with accuracy 0.94 +- 0.028 over 2 runs.",
        "the two are not told apart.",
    ),
    "the same": ([accuracy(0.9, 0.1), accuracy(0.9, 0.2)], "Best: lr 0.1, with accuracy 0.9.", "exactly as good"),
    "less is better": (
        [
            {"metrics": {"mae": 2.0}, "lr": 0.1, "target": {"mae": "<3"}},
            {"metrics": {"mae": 1.0}, "lr": 0.2, "target": {"mae": "<3"}},
        ],
        "Best: lr 0.2, with mae 1.", "That is 1 lower than the next, lr 0.1 (2).",
    ),
    "one has failed": (
        [accuracy(0.9, 0.1), accuracy(0.99, 0.2, result={"status": "fail", "exit_code": 1})],
        "Best: lr 0.1, with accuracy 0.9; no other has a figure.", "",
    ),
    "nothing measured": ([{"metrics": {}}, {"metrics": {}}], "None of these runs has measured anything", ""),
    "on other data": (
        [accuracy(0.9, 0.1, result={"measured_on": "a"}), accuracy(0.95, 0.2, result={"measured_on": "b"})],
        "No best one: these runs were measured on 2 different sets", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("those", "first", "second"), RUNS.values(), ids=RUNS)
def test_which_run_is_best_by_how_much_and_whether_it_can_be_told(
    tmp_path: Path, those: list[dict[str, Any]], first: str, second: str
) -> None:
    found = answer(runs_of(tmp_path, *those))
    assert found.sentences[0].startswith(first) and second in (found.sentences[1:] or ("",))[0]
    if found.best:  # and what chooses a model by the same runs agrees
        assert found.best[0].name == read_table([tmp_path]).best().runs[0].name


def test_the_fastest_is_named(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, *(accuracy(0.9, lr, samples_per_second=200 * lr) for lr in (1.0, 3.0)))
    assert answer(runs).sentences[-1] == "Fastest: lr 3, 600 samples/s, 3.00 times lr 1, the slowest (200)."


def test_columns_of_numbers_are_sorted_by_value_and_stand_at_the_right() -> None:
    made = table(["a", "b", "c"], [["x", Number(60, "1 min 0 s"), 1], ["y", Number(5, "5 s"), ""]], best=[1])
    assert made.count('class="num"') == 6 and 'data-value="60">1 min 0 s<' in made
    assert made.count("<button>") == 3 and '<tr class="best"><td>y</td>' in made
    assert "<button>" not in table((), [["a", "b"]])


def test_letters_of_figures_are_readable_on_a_phone_and_colours_come_in_pairs() -> None:
    rules = [(0.0, 13.0)] + [
        (float(least), float(size))
        for least, size in re.findall(r"@container \(min-width: (\d+)px\) .*?font-size: ([\d.]+)px", STYLE)
    ]
    assert (
        len(rules) > 1
        and "svg text { font-family: system-ui, sans-serif !important; font-size: 13px" in STYLE
    )
    for width in range(345, 600):  # a phone of 377 pixels, to half a page
        size = [size for least, size in rules if width >= least][-1] * width / 400
        assert 11 <= size < 15.1, (width, size)
    assert [re.findall(r"var\(--c(\d+)\)", keys([Key("", one)])) for one in (8, 9, 18)] == [
        ["8"],
        ["1"],
        ["2"],
    ]
    light, dark = re.findall(r":root \{(.*?)\}", STYLE, re.S)
    assert set(re.findall(r"--\w+", light)) == set(re.findall(r"--\w+", dark))


def test_numbers_and_times_for_people() -> None:
    numbers = (0.97213, 15000, 2.5e6, 5e-4, 0, 1e9, -12345, 9999.7, 999999.7, float("inf"))
    texts = ["0.9721", "15k", "2.5M", "5e-4", "0", "1G", "-12.35k", "10k", "1M", "inf"]
    assert [compact(one) for one in numbers] == texts
    assert [count_text(one) for one in (12345.6, 99.97, 12.34, 0.2)] == ["12,346", "100", "12.3", "0.2"]
    assert [seconds_text(one) for one in (0.534, 48.2, 185, 7440)] == [
        "0.53 s",
        "48 s",
        "3 min 5 s",
        "2 h 4 min",
    ]
