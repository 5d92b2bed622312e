"""What users have called things is quoted wherever it leaves, and printing it ends nothing."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.cli.main import main
from mpitrain.reporting.console import Console
from mpitrain.reporting.logs.csv_log import CsvLog
from mpitrain.system.saying import csv_cell, say, write
from tests.ranks import ROOT

EVIL = "=HYPERLINK(1)\x1b[31m<script>\u202e"
POOR = "env -u HOME LC_ALL=C PYTHONUTF8=0 PYTHONIOENCODING=ascii"
FORMULAS = ("=1", "+x", "-x", "@x", "\tx", "\rx")


def write_run(folder: Path, name: str, seed: int = 0) -> None:
    """A run in which everything that users name bears the name."""
    folder.mkdir(parents=True)
    facts = {
        "job": name, "strategy": name, "strategy_asked": name, "workers": 1, "servers": 0, "nodes": 1, "steps": 1,
        "batch_size": 1, "device": name, "precision": name, "seed": seed, "samples": 8, "samples_per_second": 1.0,
        "train_s": 1.0, "wall_s": 1.0, "synthetic": False, "run_dir": str(folder), "model": name,
    }  # fmt: skip
    result = {
        **facts, "status": "fail", "exit_code": 3, "failure": name, "metrics": {name: 1.0, "accuracy": 0.5},
        "options": {name: name, "other": f"{name}{seed}"}, "target": {name: name}, "ranks": [], "run": name,
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "run.json").write_text(json.dumps({"overrides": {"init": name}, "job_file": name, "run": name}))
    (folder / "env.json").write_text(json.dumps({"host": name, "packages": {name: name}}))
    rows = [
        {"t": 0, "event": "start", "strategy": name, "job": name, "schema": 3},
        {"t": 1, "event": "progress", "samples": 4, "loss": 1.0, name: 2.0},
        {"t": 2, "event": "validation", "samples": 8, "epoch": 1, name: 1.0, "accuracy": 0.5},
        {"t": 3, "event": name, "text": name},
        {"t": 4, "event": "end", "samples": 8, "failure": name, name: 1.0},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


JOB = """
import torch, mpitrain as mt
job = mt.Job(
    model=lambda: torch.nn.Linear(3, 1), loss=lambda m, b: (m(b["x"]) ** 2).mean(),
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1), data=mt.Synthetic(16, x=((3,), "float32")),
    validate=mt.Synthetic(8, x=((3,), "float32")), batch_size=8, name=NAME,
    metrics=lambda m, b: {NAME: torch.tensor(1.0)},
)
"""
COMMANDS = [
    "runs table {a} {b}", "runs table {a} {b} --csv -", "runs table {a} {b} --csv {out}.csv --html {out}.html",
    "runs best {a} {b} --metric accuracy", "runs best {a} {b}", "runs table {evil}",
    "runs goodput {a}", "runs goodput {a} {evil}", "runs goodput {evil}",
    "report {a} {b} -o {out}.html", "compare {a} {b}", "compare {a} {b} --across other --json {out}.json",
    "ensemble {a} {b} -o {out}", "predict {a} {evil} -o {out}.h5", "export {a} -o {out}.pt2",
    "data info {evil}", "data check {evil}", "data pack {evil} {out}", "data stage {evil} {out}",
    "data unstage {evil} {out}", "slurm status {a}", "slurm requeue {a}",
    "slurm render single-node {job} --set name={evil}", "slurm submit single-node {evil}",
    "train {evil} --dry-run", "train {job} --strategy {evil} --dry-run",
    "train {job} --dry-run --ranks 2", "train {job} {evil} --dry-run",
    "train {job} --config {evil} --dry-run", "train {job} --target {evil} --dry-run",
    "train {job} --set {evil}=1 --dry-run",
    "launch -n 2 train {evil}", "launch -n 2 --host {evil} train {job} --dry-run",
    "sweep {job} --vary lr=0.1,0.2 --vary init={evil} --dry-run", "sweep {job} --vary {evil}=1 --dry-run",
    "plan {job} --compute {evil}", "bench {job} --strategies {evil}", "bench {evil}",
    "simulate {job} --workers 2 --run-dir {out}-run", "simulate {job} --workers 2 --compute {evil}",
    "simulate --replay {a}", "doctor --job {evil}", "env --{evil}", "{evil}",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_that_was_named_steers_a_terminal_a_table_or_a_page(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {name: tmp_path / f"{name}{EVIL}".replace("/", "") for name in "ab"}
    for seed, place in enumerate(places.values()):
        write_run(place, EVIL, seed)
    (tmp_path / "job.py").write_text(f"NAME = {EVIL!r}\n{JOB}")
    words = {**places, "evil": EVIL, "job": tmp_path / "job.py", "out": tmp_path / "out"}
    try:
        main([word.format(**words) for word in command.split()])
    except SystemExit as error:
        assert error.code == 2
    out, err = capsys.readouterr()
    assert [each for each in out + err if not each.isprintable() and each != "\n"] == []
    for path in tmp_path.glob("out*"):
        if path.suffix == ".html":
            page = path.read_text()
            assert page.count("<script>") == 1 and "\x1b" not in page, "the page's own"
    if "--csv" in command:
        text = (tmp_path / "out.csv").read_text() if (tmp_path / "out.csv").exists() else out
        cells = [cell for line in csv.reader(io.StringIO(text)) for cell in line]
        assert len(cells) > 10 and [cell for cell in cells if cell.startswith("=")] == []


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_becomes_a_text_and_a_number_stays_one(text: str) -> None:
    assert str(csv_cell(text)).startswith("'")
    assert [csv_cell(one) for one in ("-0.5", "+1e-3", "a=b", -2.0, "")] == ["-0.5", "+1e-3", "a=b", -2.0, ""]


def test_the_log_of_a_run_quotes_its_columns_and_goes_on_with_them(tmp_path: Path) -> None:
    for start in (0, 8):
        log = CsvLog(tmp_path / "m.csv", start)
        for samples in (start, start + 4):
            log.row({"event": "progress", "samples": samples, EVIL: -0.5, "text": "=1"})
        log.close()
    lines = list(csv.DictReader(io.StringIO((tmp_path / "m.csv").read_text())))
    assert [line["samples"] for line in lines] == ["0", "4", "8", "12"]
    name = next(name for name in lines[0] if "HYPERLINK" in name)
    assert name.startswith("'=") and "\x1b" not in name
    assert {line[name] for line in lines} == {"-0.5"} and {line["text"] for line in lines} == {"'=1"}


class Broken(io.StringIO):
    """A stream that raises."""

    def __init__(self, error: Exception):
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "broken"), ValueError("closed"), OSError(28, "full")], ids=repr
)
def test_printing_never_raises(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpitrain.system.saying._lost", "")
    for stream in (Broken(error), None):
        monkeypatch.setattr(sys, "stdout", stream)
        say("é")
        write(stream, "é")
        Console(stream, quiet=False).event("é")
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    write(ascii_only, "é\n")
    assert ascii_only.buffer.getvalue() == b"\\xe9\n"  # type: ignore[attr-defined]


def shell(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = f'mpitrain() {{ {sys.executable} -m mpitrain "$@"; }}; {line}'
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(["bash", "-c", command], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("mpitrain runs table a | head -c 1 > out; exit ${PIPESTATUS[0]}", 0, ""),
        ("mpitrain train --help | head -c 1 > out; exit ${PIPESTATUS[0]}", 0, ""),
        ("mpitrain runs table a >&-", 0, ""),
        ("mpitrain runs table a >&- 2>&- <&-", 0, ""),
        ("mpitrain runs table a > /dev/full", 1, "takes nothing more: No space left"),
        (f"{POOR} {sys.executable} -m mpitrain runs table a", 0, ""),
        ("mkdir gone; cd gone; rmdir ../gone; mpitrain runs table ../a", 2, "is gone; change to another"),
    ],
)  # fmt: skip
def test_a_stream_or_place_that_is_missing_is_one_line_or_none(
    line: str, code: int, said: str, tmp_path: Path
) -> None:
    write_run(tmp_path / "a", "é", 0)
    done = shell(line, tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (code, bool(said)), done.stderr
    assert said in done.stderr


@pytest.mark.extended
def test_a_run_is_good_whatever_becomes_of_what_it_prints(tmp_path: Path) -> None:
    """Two ranks, both streams closed, no home, names that no encoding knows."""
    place = tmp_path / "é"
    place.mkdir()
    shutil.copy(ROOT / "tests" / "search" / "job.py", place / "é.py")
    words = "launch -n 2 train é.py --epochs 1 --run-dir é"
    done = shell(f"{POOR} {sys.executable} -m mpitrain {words} >&- 2>&-", place)
    assert done.returncode == 0
    assert json.loads((place / "é" / "result.json").read_text())["exit_code"] == 0
