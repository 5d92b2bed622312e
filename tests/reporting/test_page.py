"""The page of `mpitrain report`: it shows what the files say, needs nothing else, and takes half-written files."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mpitrain import Async, simulate
from mpitrain.cli import main as cli
from mpitrain.errors import UsageError
from mpitrain.reporting.pages import comparison_page, curves
from mpitrain.reporting.pages.figures import Drawing, pieces
from mpitrain.reporting.pages.page import page, write_page
from mpitrain.reporting.pages.times import shares, worker_times
from mpitrain.reporting.rows import metrics_in
from mpitrain.reporting.run_files import read_runs
from mpitrain.reporting.traced_time import Span
from tests import toy

SVG = "{http://www.w3.org/2000/svg}"


class Tables(HTMLParser):
    """Rows of all tables as lists of texts, tags that were opened, and what points elsewhere."""

    def __init__(self, text: str):
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self.points_to: list[str] = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.points_to += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._in_cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += data

    def row(self, name: str) -> list[str]:
        (found,) = [row[1:] for row in self.rows if row[0] == name]
        return found


def write_run(
    folder: Path, rows: list[dict[str, Any]] | None = None, result: dict[str, Any] | None = None, **more: Any
) -> Path:
    folder.mkdir()
    usual = [
        {"event": "start", "t": 0.0},
        {"event": "progress", "t": 1.0, "step": 1, "samples": 10, "loss": 2.0, "samples_per_second": 10.0},
        {"event": "progress", "t": 2.0, "step": 2, "samples": 20, "loss": 1.0, "samples_per_second": 12.0},
        {"event": "validation", "t": 2.5, "epoch": 1, "samples": 20, "validation_loss": 1.5},
    ]
    lines = [json.dumps({"time": "now"} | row) for row in (usual if rows is None else rows)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if result is not None:
        (folder / "result.json").write_text(
            json.dumps({"status": "ok", "exit_code": 0, "metrics": {}} | result)
        )
    for name, value in more.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def made(*folders: Path) -> tuple[str, Tables]:
    text = page(read_runs(list(folders)))
    return text, Tables(text)


def lines_of(svg: str) -> list[int]:
    """How many points each line has that is a curve (drawn in one of the colours and not filled)."""
    found = []
    for path in ElementTree.fromstring(svg).iter(f"{SVG}path"):
        style = path.get("style", "")
        if "fill: none" in style and "stroke: var(--c" in style:
            found.append(len(re.findall("[ML]", path.get("d", ""))))
    return found


def figures_of(text: str, title: str, kind: str = "by-samples") -> list[str]:
    """The drawings of this name."""
    return [
        one
        for one in re.findall(r"<svg.*?</svg>", text, re.S)
        if f"<title>{title}</title>" in one and kind in one
    ]


def test_a_real_run_is_shown_with_the_figures_of_its_result(tmp_path: Path) -> None:
    job = toy.make_job(validate=toy.Memory(12))
    simulate(job, Async(), run_dir=str(tmp_path / "run"), quiet=True, workers=3, log_every=3)
    text, tables = made(tmp_path / "run")
    assert "at_s of validation" not in text
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert tables.row("strategy") == ["async()"] and tables.row("steps") == [str(result["steps"])]
    assert float(tables.row("validation_loss")[0]) == pytest.approx(result["validation_loss"], rel=1e-4)
    for heading in ("Curves", "Where the time went", "Faults, restarts and warnings", "Everything else"):
        assert f"<h2>{heading}</h2>" in text
    assert "its seconds are virtual ones" in text and "virtual seconds since the first step" in text
    assert all(one.startswith("#") for one in tables.points_to), "nothing is fetched"
    assert not {"link", "img", "iframe"} & set(tables.tags) and tables.tags.count("script") == 1
    assert len(re.findall("Staleness|Loss", text.partition("<h2>Curves")[0])) <= 1, (
        "sentences before pictures"
    )


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", result={"staleness_histogram": {"0": 3, "2": 1}})
    assert made(run)[0] == made(run)[0]


def test_curves_go_through_the_rows_and_break_where_a_run_went_back(tmp_path: Path) -> None:
    rows = [{"event": "start", "t": 0.0}]
    rows += [{"event": "progress", "t": float(i), "samples": 10 * i, "loss": 1.0 / i} for i in range(1, 6)]
    rows += [{"event": "start", "t": 0.0}, {"event": "worker lost", "t": 0.5, "worker": 3}]
    rows += [{"event": "progress", "t": 1.0 + i, "samples": 30 + 10 * i, "loss": 0.5} for i in range(3)]
    rows += [{"event": "progress", "t": 9.0, "samples": 99, "loss": float("nan")}]
    (run,) = read_runs([write_run(tmp_path / "run", rows)])
    progress = run.of_kind("progress")
    assert [row["at_s"] for row in progress[4:7]] == [5.0, 6.0, 7.0]
    assert [len(xs) for xs, _ in pieces(progress, "samples", "loss")] == [5, 3]
    happened = [(row["at_s"], row["event"]) for row in run.unusual()]
    assert happened == [(5.0, "started again"), (5.5, "worker lost")]
    text, tables = made(run.folder)
    assert [lines_of(svg) for svg in figures_of(text, "Loss")] == [[5, 3]]
    assert tables.row("5.5 s") == ["worker lost", "worker: 3"] and "has not come to its end" in text


def test_the_shares_of_a_workers_time_are_those_of_its_training(tmp_path: Path) -> None:
    ranks = [
        {"rank": 0, "role": "server"},
        {
            "rank": 1,
            "role": "worker",
            "compute_s": 3.0,
            "wait_s": 2.0,
            "checkpoints": {"copy_s": 0.5, "wait_s": 0.25},
        },
        {"rank": 2, "role": "worker", "compute_s": 11.0},
    ]
    (run,) = read_runs([write_run(tmp_path / "run", result={"train_s": 10.0, "ranks": ranks})])
    assert worker_times(run) == [
        {"rank": 1, "compute_s": 3.0, "wait_s": 2.0, "checkpoint_s": 0.75, "rest_s": 4.25},
        {"rank": 2, "compute_s": 11.0, "wait_s": 0.0, "checkpoint_s": 0.0, "rest_s": 0.0},
    ]
    many = [{"rank": rank, "role": "worker", "compute_s": 1.0} for rank in range(1000)]
    (run,) = read_runs([write_run(tmp_path / "many", result={"train_s": 10.0, "ranks": many})])
    ElementTree.fromstring(shares(run, "time"))
    assert "64 of 1000 at most" in made(run.folder)[0]


def test_several_runs_lie_over_one_another_and_their_differences_are_told(tmp_path: Path) -> None:
    one = write_run(
        tmp_path / "one", result={"strategy": "sync()", "seed": 1}, run={"overrides": {"lr": 0.5, "seed": 1}},
        env={"packages": {"torch": "2.13"}, "platform": {"host": "a"}},
    )  # fmt: skip
    two = write_run(
        tmp_path / "two", result={"strategy": "async()", "seed": 1, "options": {"model.hidden": 9}},
        run={"overrides": {"lr": 0.25, "seed": 1}}, env={"packages": {"torch": "2.13"}, "platform": {"host": "b"}},
    )  # fmt: skip
    text, tables = made(one, two)
    different = Tables(text.partition("What else was different")[2].partition("<h2>")[0])
    names = ["sync(), lr 0.5", "async(), lr 0.25, model.hidden 9"]
    assert different.rows == [["", *names], ["environment.platform.host", "a", "b"]]
    assert tables.row("strategy") == ["sync()", "async()"] and tables.row("model.hidden") == ["", "9"]
    assert [lines_of(svg) for svg in figures_of(text, "Loss")] == [[2, 1, 2, 1]], (
        "one validation each is a dot"
    )
    legend = text.partition('class="keys"')[2].partition("</ul>")[0]
    assert all(name in legend for name in names)


def test_two_directories_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
        write_run(tmp_path / parent / "run", result={})
    names = [run.name for run in read_runs([tmp_path / "a" / "run", tmp_path / "b" / "run"])]
    assert names == [str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")]


def test_what_comes_from_a_run_is_never_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>$\\frac{"
    rows = [
        {"event": "start", "t": 0},
        {"event": "validation", "t": 1, "samples": 1, evil: 1.0},
        {"event": "warning", "t": 1, "text": evil},
        {"event": "end", "t": 2, "failure": evil},
    ]
    run = write_run(
        tmp_path / "run<b>", rows, {"status": "fail", "failure": evil, "strategy": evil, "options": {evil: evil}},
        env={"command": [evil], evil: evil}, run={"overrides": {evil: evil}},
    )  # fmt: skip
    text, tables = made(run)
    assert tables.tags.count("script") == 1 and "alert(1)</script" not in text
    assert "&lt;script&gt;" in text and tables.row("strategy") == [evil]
    assert "default-src &#x27;none&#x27;" in text, "and if it were one, it would not run"


def test_torn_rows_and_missing_files_are_said_and_passed_over(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(
            '{"event": "progress", "t": 3.0, "sam\n[1]\n{"event": "progress"}\n{"t": "x", "event": "a"}\n'
        )
    (run / "result.json").write_text('{"stat')
    text, _ = made(run)
    assert "4 lines of metrics.jsonl could not be read" in text and "has not come to its end" in text
    only = tmp_path / "only"
    only.mkdir()
    (only / "result.json").write_text(json.dumps({"status": "ok", "metrics": {"accuracy": 0.5}}))
    assert made(only)[1].row("accuracy") == ["0.5"]


@pytest.mark.parametrize(
    ("name", "message"), [("nowhere", "there is no directory"), ("empty", "holds no run")]
)
def test_a_directory_without_a_run_is_refused(
    tmp_path: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    run = write_run(tmp_path / "run", result={})
    out = tmp_path / "report.html"
    assert cli.main(["report", str(run), str(tmp_path / name), "-o", str(out)]) == 2
    assert message in capsys.readouterr().err and not out.exists()
    assert cli.main(["report", str(run), "-o", str(out)]) == 0 and out.read_text().startswith(
        "<!doctype html>"
    )
    assert capsys.readouterr().out == f"written: {out}\n"


def test_without_matplotlib_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'mpitrain\[plot\]'"):
        write_page([write_run(tmp_path / "run", result={})], tmp_path / "report.html")


def test_a_run_that_was_killed_is_shown_by_what_it_was_started_with(tmp_path: Path) -> None:
    start = {
        "event": "start",
        "t": 0.0,
        "job": "digits",
        "strategy": "async()",
        "workers": 4,
        "samples": 1000,
    }
    rows = [start, {"event": "progress", "t": 1.0, "step": 1, "samples": 10, "loss": 2.0}]
    found = Tables(page(read_runs([write_run(tmp_path / "killed", rows)])))
    assert found.row("status") == ["not finished"] and found.row("job") == ["digits"]
    assert found.row("strategy") == ["async()"] and found.row("workers") == ["4"]
    assert not [row for row in found.rows if row and row[0] == "samples"]  # those of the data, in this row


def test_a_directory_of_runs_stands_for_all_of_them(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_run(tmp_path / name)
    (tmp_path / "notes").mkdir()
    assert [run.name for run in read_runs([tmp_path])] == ["a", "b"]


def test_the_traced_steps_are_added_up_by_category(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "traced")
    job = toy.make_job(trace="steps=1:3", validate=toy.Memory())
    simulate(job, Async(), workers=2, run_dir=str(folder), quiet=True)
    (folder / "trace-rank-9.json").write_text('{"traceEvents": [')
    traced = read_runs([folder])[0].traced()
    assert [one.label for one in traced] == [
        "rank 0 (server, virtual)", "rank 1 (worker, virtual)", "rank 2 (worker, virtual)",
    ]  # fmt: skip
    text = page(read_runs([folder]))
    row = Tables(text).row("rank 1 (worker, virtual)")
    shares = [float(cell.split()[0]) for cell in row[2:] if cell.endswith("%")]
    head = next(cells for cells in Tables(text).rows if cells[:2] == ["rank", "steps"])
    share = traced[1].seconds["compute"] / sum(traced[1].seconds.values())
    compute = dict(zip(head[1:], row, strict=True))["compute"]
    assert 0 < share < 1 and compute == f"{100 * share:.1f} %" and "other" not in head
    assert row[0] == "2" and sum(shares) == pytest.approx(100, abs=0.3) and "Traced steps" in text


def test_a_line_is_broken_where_training_went_back_also_by_time(tmp_path: Path) -> None:
    rows = [
        {"at_s": float(at), "samples": samples, "loss": 1.0} for at, samples in enumerate((10, 20, 10, 20))
    ]
    assert [len(xs) for xs, _ in pieces(rows, "at_s", "loss")] == [2, 2]


def test_a_figure_shows_names_that_are_no_text_escaped():
    drawing = Drawing("x\udcff")
    drawing.line([1, 2], [1, 2], 1, name="run\udc80")
    drawn = drawing.svg("y\ud800")
    assert all(escaped in drawn for escaped in ("x\\udcff", "y\\ud800", "run\\udc80"))


def test_families_of_metrics_are_folded_and_what_changed_stands_first(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"event": "start", "t": 0.0}]
    for at in (1, 2, 3):
        metrics = {f"recall/class_{one}": 0.1 * at + one / 100 for one in range(30)}
        metrics |= {f"support/class_{one}": 12.0 for one in range(30)}
        metrics |= {"accuracy": 0.3 * at, "auc": 0.5 + 0.01 * at, "size": 7.0, "validation_loss": 1.0 / at}
        rows.append({"event": "validation", "t": float(at), "samples": 10 * at, "epoch": at, **metrics})
    run = write_run(tmp_path / "run", rows, {"target": {"auc": 0.9}, "metrics": metrics, "status": "missed"})
    text, _ = made(run)
    titles = re.findall(r"<figcaption><b>(.*?)</b>", text)
    assert titles == ["Loss", "auc", "accuracy", "recall/class_*"], (
        "the target's, then what changed, then families"
    )
    assert "Unchanged from the first validation to the last: support/class_*, size." in text
    fold = text.partition("<summary>recall/class_*: 30 metrics</summary>")[2].partition("</details>")[0]
    assert fold.count("<tr>") == 31 and "<details open" not in text
    assert Tables(fold).row("recall/class_29") == ["0.39", "0.59", "0.2"]


def test_a_run_validated_once_is_told_and_has_no_empty_picture(tmp_path: Path) -> None:
    rows = [
        {"event": "start", "t": 0.0},
        {"event": "progress", "t": 41.0, "step": 1, "samples": 10, "loss": 2.0, "samples_per_second": 0.2},
        {
            "event": "validation",
            "t": 42.0,
            "epoch": 1,
            "samples": 20,
            "validation_loss": 1.5,
            "accuracy": 0.25,
        },
    ]
    text, _ = made(write_run(tmp_path / "run", rows, {"metrics": {"validation_loss": 1.5, "accuracy": 0.25}}))
    assert (
        re.findall("<figcaption>.*", text) == []
        and "Validated once, after 20 samples: validation_loss 1.5, accuracy 0.25." in text
    )
    assert "There are not yet points enough for a picture." in text
    rows[2:2] = [rows[-1] | {"samples": 10, "validation_loss": "nan", "accuracy": "nan"}]
    assert "Validated once" not in made(write_run(tmp_path / "twice", rows))[0]


def test_the_metrics_of_a_row_are_gathered_once_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[Any] = []
    monkeypatch.setattr(curves, "metrics_in", lambda row: gathered.append(row) or metrics_in(row))
    monkeypatch.setattr(curves, "both_ways", lambda title, draw: "<svg></svg>")
    rows: list[dict[str, Any]] = [{"event": "start", "t": 0.0}]
    for at in (1, 2, 3):
        recalls = {f"recall/class_{one}": 0.1 * at for one in range(10)}
        rows.append({"event": "validation", "t": float(at), "samples": at, **recalls})
    text, _ = made(*(write_run(tmp_path / name, rows) for name in "ab"))
    assert "Mean of recall/class_*" in text and len(gathered) == 2 * 3


def test_rates_and_times_of_several_runs_are_written_for_people(tmp_path: Path) -> None:
    results = {
        "fast": {"samples_per_second": 12345.6, "train_s": 5.0},
        "slow": {"samples_per_second": 0.2, "virtual_s": 185.0},
        "slower": {"samples_per_second": 0.1},
    }
    start = [{"event": "start", "t": 0.0}]
    fast, slow, slower = (write_run(tmp_path / name, start, result) for name, result in results.items())
    text, tables = made(fast, slow)
    assert "<b>12,346</b>" in text and tables.row("fast") == ["12,346", "5 s", "finished"]
    assert tables.row("slow") == ["0.2", "3 min 5 s", "finished"] and tables.row("virtual_s") == ["", "185"]
    assert "<b>0.2</b>" in made(slow, slower)[0]


def test_simulated_runs_beside_one_another_are_written_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison_page, "read_spans", lambda run_dir: {1: [Span("compute", 0.0, 1.0)]})
    row = {
        "strategy": "sync()", "workers": 1, "samples_per_s": 123456.7, "speed_up": 1.0, "utilisation": 1.0,
        "staleness": {}, "dropped_share": 0.0, "virtual_s": 2.0, "run_dir": "run",
    }  # fmt: skip
    text = comparison_page.comparison_page({
        "job": "job", "rows": [row], "compute": "", "network": "", "costs": "", "seed": 0, "gradients": False,
        "one_device_samples_per_s": 1234567.8, "target": None, "limits": [],
    })  # fmt: skip
    assert "1,234,568 samples/s" in text and "Fastest with 1 worker: sync(), 123,457 samples/s" in text
    assert Tables(text).row("sync()")[:2] == ["1", "123,457"] and "sync(), 1 worker: the traced steps" in text


def test_time_counts_from_the_first_step_of_each_start(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for _ in range(2):
        rows += [{"event": "start", "t": 0.0}, {"event": "training", "t": 40.0, "samples": 0}]
        rows += [{"event": "progress", "t": 40.0 + at, "samples": 10 * at, "loss": 1.0} for at in (1, 2)]
    (run,) = read_runs([write_run(tmp_path / "run", rows)])
    assert [row["trained_s"] for row in run.of_kind("progress")] == [1.0, 2.0, 3.0, 4.0]
    assert [row["at_s"] for row in run.of_kind("progress")] == [41.0, 42.0, 83.0, 84.0]
