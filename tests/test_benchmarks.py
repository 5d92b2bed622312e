"""Every benchmark runs: at a tiny size it prints its table, at most 80 columns wide where it says so, and writes
its row. No figure of time is looked at.
"""

import dataclasses
import importlib
import json
import math
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.ranks import ROOT, find_mpi, run_plain, run_ranks
from tests.sampling import sampled

BENCHMARKS = {
    "beside_checkpoint": (2, ["--rounds", "1", "--width", "300"]),
    "guard_cost": (2, ["--rounds", "1", "--block", "1", "--model", "transformer"]),
    "large": (2, ["--rounds", "1", "--width", "300"]),
    "loaded": (2, ["--rounds", "1", "--steps", "2", "--busy", "1"]),
    "gathering": (1, ["--rounds", "1", "--sizes", "10", "300", "--pushes", "900"]),
    "packing": (2, ["--rounds", "1", "--megabytes", "1"]),
    "after_pause": (2, ["--pauses-ms", "0", "1", "1000", "--rounds", "6", "--busy", "--bound"]),
    "push_parts": (2, ["--rounds", "1"]),
    "codec_cost": (1, ["--numbers", "50000", "--settle", "2", "--rounds", "2"]),
    "rates": (1, ["--workers", "8", "--seeds", "1", "--epochs", "1", "--rounds", "1", "--speeds", "unequal"]),
    "reader": (
        1,
        ["--rounds", "1", "--megabytes", "1", "--cases", "1", "--compute-s", "0", "--turn-steps", "2"],
    ),
    "reading": (1, ["h5py", "--rounds", "1", "--megabytes", "1", "--turn-s", "0.1"]),
    "server": (4, ["--megabytes", "0.0655", "1", "--rounds", "2", "--idle-s", "0"]),
    "sparse_tables": (4, ["rpc", "--rounds", "1", "--steps", "4", "--rows", "1000", "--batch", "16"]),
    "sparse": (2, ["--rounds", "1", "--block", "1", "--rows", "1000", "--batch", "16"]),
    "tables": (4, ["--rounds", "1", "--block", "1", "--rows", "1000", "--batch", "16"]),
    "staleness_sensitivity": (
        1,
        ["--rounds", "1", "--epochs", "1", "--workers", "1", "4", "--rates", "1"],
    ),
    "splitting": (2, ["--rounds", "1", "--steps", "2"]),
    "step_time": (3, ["--rounds", "1", "--block", "1", "--model", "mlp"]),
    "virtual_speed": (1, ["--rounds", "1", "--pushes", "600", "--workers", "30", "--ranks", "40"]),
    "stragglers": (5, ["--rounds", "1", "--epochs", "1", "--compute", "real", "--strategies", "sync()"]),
}

SAMPLE = ("codec_cost", "reader", "step_time")  # what `make test` runs of them

BY_HAND = {
    "aggregation",
    "averaging",
    "chaos",
    "codec_accuracy",
    "collectives",
    "compression",
    "ensemble",
    "gpu",
    "growth",
    "held_out",
    "job_tables",
    "literature",
    "low_communication",
    "memory",
    "memory_told",
    "node_outage",
    "other_mpi",
    "prediction",
    "published",
    "quantisation",
    "search",
    "signals",
    "slurm_signals",
    "sweeps",
    "threads",
    "tolerance_cost",
}  # take minutes, root, or libraries that are not in our environment

QUESTIONS = {
    path.stem: path for path in (ROOT / "benchmarks").rglob("*.py") if "\nMEASUREMENT = " in path.read_text()
}


def rows_of(name: str, results: Path) -> list[dict]:
    return [json.loads(line) for line in (results / f"{name}.jsonl").read_text().splitlines()]


def test_every_benchmark_is_here_and_its_folder_shows_questions():
    assert set(QUESTIONS) == set(BENCHMARKS) | BY_HAND
    assert set((ROOT / "benchmarks").glob("*.py")) <= set(QUESTIONS.values())
    folders = {path.parent for path in (ROOT / "benchmarks").rglob("*.py")}
    others = folders - {path.parent for path in QUESTIONS.values()}
    assert {path.name for path in others} == {"libraries", "measuring", "pages", "suites"}


def test_only_pages_read_results():
    named = {path.name for path in (ROOT / "benchmarks").rglob("*.py") if '"results"' in path.read_text()}
    assert named == {"common.py", "rows.py"}  # the first of them appends


@pytest.fixture(scope="module")
def helps():
    programs = [*map(str, QUESTIONS.values()), str(ROOT / "benchmarks" / "measuring" / "hosts.py")]
    return json.loads(run_plain([sys.executable, str(ROOT / "tests" / "show_helps.py"), *programs]))


@pytest.mark.parametrize("name", sorted(set(QUESTIONS) - {"published"}))
def test_every_program_says_how_often_it_measures_and_records_on_request(helps, name):
    """`--rounds` of a measurement, `--kills` of a campaign; no row is written without `--record`."""
    assert "--record" in helps[name]
    assert (
        "--kills" if name in ("chaos", "signals", "slurm_signals", "node_outage") else "--rounds"
    ) in helps[name]


def test_the_emulated_hosts_explain_themselves(helps):
    assert "run" in helps["hosts"] and "down" in helps["hosts"]


@pytest.fixture
def common(tmp_path, monkeypatch):
    """What writes rows, in a repository of its own with one commit."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.delenv("MPITRAIN_BENCHMARK_RESULTS", raising=False)
    common = importlib.reload(importlib.import_module("measuring.common"))
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(common, "TRACKED", tmp_path / "benchmarks" / "results")
    common.TRACKED.mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    for name in ("code.py", "page.md", "tests/gpu.txt", "benchmarks/results/some.jsonl"):
        (tmp_path / name).write_text("<!-- generated: figures -->\n" if name.endswith(".md") else "")
    me = ("-c", "user.name=me", "-c", "user.email=me@here")
    for words in (("init", "-q"), ("add", "."), (*me, "commit", "-qm", "all")):
        common.git(*words)
    return common


def parser_of(common):
    return common.make_parser("", common.Measurement(("mpitrain",)))


def test_rows_are_tracked_only_on_request(common, capsys):
    parser_of(common).parse_args([])
    common.write_row("some", {"figure": 1})
    assert rows_of("some", common.TRACKED) == [] and "--record" in capsys.readouterr().out
    parser_of(common).parse_args(["--record"])
    common.write_row("some", {"figure": 1})
    (row,) = rows_of("some", common.TRACKED)
    assert row["figure"] == 1 and row["commit"] == common.git("rev-parse", "--short", "HEAD")


def test_a_row_is_refused_where_the_tree_is_not_its_commit_before_anything_is_measured(
    common, capsys, monkeypatch
):
    for name in ("page.md", "tests/gpu.txt", "benchmarks/results/some.jsonl"):
        (common.ROOT / name).write_text("<!-- generated: figures -->\nelse")
    parser_of(common).parse_args(["--record"])  # what runs and `make docs` write may differ
    (common.ROOT / "code.py").write_text("else")
    with pytest.raises(SystemExit) as refused:
        parser_of(common).parse_args(["--record"])
    told = capsys.readouterr().err
    assert refused.value.code == 2 and told.count("\n") == 1 and "code.py" in told and "page.md" not in told
    monkeypatch.setenv("PMIX_RANK", "1")  # one rank of a launch says it
    parser_of(common).parse_args(["--record"])


def test_a_row_names_its_machine_versions_settings_and_what_else_ran(common, monkeypatch):
    def row_of(load, stolen):
        ticks = iter(([0] * 8, [50, 0, 0, 50 - stolen, 0, 0, 0, stolen]))
        monkeypatch.setattr(common, "ticks", lambda: next(ticks))
        monkeypatch.setattr(common.os, "getloadavg", lambda: (load,) * 3)
        parser = parser_of(common)
        parser.add_argument("--sizes", nargs="+", type=int)
        parser.parse_args(["--record", "--sizes", "4", "5"])
        common.write_row("some", {})
        return rows_of("some", common.TRACKED)[-1]

    row = row_of(0.0, 0)
    assert row["settings"] == {"sizes": [4, 5]} and not row["under_load"] and row["busy_share"] == 0.5
    assert {"torch", "numpy", "mpi4py", "pytest"} <= set(row["versions"])
    assert row["num_cores"] > 0 and {"cpu", "caches", "criterion", "load_during", "wall_s"} <= set(row)
    stolen = row_of(0.0, 5)  # nobody else waits for a core, and the host has taken one away
    assert stolen["under_load"] and stolen["steal_share"] == 0.05
    assert row_of(99.0, 0)["under_load"]


def test_a_row_is_refused_whose_run_imported_what_its_program_does_not_declare(common, capsys):
    common.make_parser("", common.Measurement(("mpitrain/*.py", "mpitrain/sys*"))).parse_args(["--record"])
    with pytest.raises(SystemExit):
        common.write_row("some", {"figure": 1})
    told = capsys.readouterr().err
    assert "mpitrain/system/launched/launch_variables.py" in told and "mpitrain/__init__.py" not in told
    assert rows_of("some", common.TRACKED) == [] and '"figure": 1' in told  # the figures are not lost


@pytest.mark.parametrize("name", sorted(QUESTIONS))
def test_every_program_declares_what_its_figures_rest_on(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    measurement = importlib.import_module("measuring.measurement")
    found = measurement.declared(QUESTIONS[name])
    assert found.depends and measurement.missing(found.depends) == []
    assert "?" in measurement.question(measurement.program_of(name))
    assert measurement.missing(["mpitrain/nothing", "mpitrain/*.txt"]) == [
        "mpitrain/nothing",
        "mpitrain/*.txt",
    ]


@pytest.fixture
def freshness(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("pages.freshness")


def test_a_row_is_stale_if_dirty_of_no_commit_here_or_followed_by_many_that_touch_what_it_rests_on(freshness):
    history = object.__new__(freshness.History)
    history._known = {}
    touched = ["mpitrain/mpi/runtime.py", "docs/jobs.md", "benchmarks/collectives.py"] * 101
    history.commits = [(f"{number:07x}aa", [path]) for number, path in enumerate(touched)]
    old, still_fresh = f"{302:07x}", f"{300:07x}"
    assert (history.since("collectives", old), history.since("collectives", still_fresh)) == (201, 200)
    assert history.stale("collectives", {"commit": old}).startswith("201 commits old")
    assert history.stale("collectives", {"commit": still_fresh}) == ""
    assert "not in the history" in history.stale("collectives", {"commit": "fffffff"})
    assert "not its commit" in history.stale("collectives", {"commit": "0000001-dirty"})


def test_stale_rows_behind_the_documentation_are_named(freshness):
    """As a warning: what to measure anew waits for a quiet machine."""
    if reason := freshness.why_not():
        pytest.skip(reason)
    pages = {page for page, _, _ in freshness.used()}
    assert {"README.md", "docs/fault-tolerance.md", "benchmarks/README.md"} <= pages
    found = [f"{page}: {text}" for page, text in freshness.problems() if page != "benchmarks/README.md"]
    if found:
        warnings.warn("make evidence-check names more:\n" + "\n".join(found), stacklevel=1)


@pytest.fixture
def pages(monkeypatch):
    """The modules `rows`, `report` and `earlier`, and what programs declare."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    names = ("pages.rows", "pages.report", "pages.earlier", "measuring.measurement")
    return [importlib.import_module(name) for name in names]


def test_no_row_drops_off_the_page(pages):
    """Every row of every program is one of a setting that its section shows."""
    rows, report, _, _ = pages
    files = {path.stem for path in rows.RESULTS.glob("*.jsonl")}
    settings = [setting for _, setting in rows.shown_by(report.programs) if setting]
    assert files == {setting.name for setting in settings}
    for name in files:
        seen = {id(row) for setting in settings if setting.name == name for row in setting.rows}
        assert seen == set(map(id, rows.rows_of(name))), name


def test_the_newest_row_without_a_flaw_is_shown_among_all_of_its_setting(pages):
    rows, _, _, measurement = pages
    of_two = measurement.Measurement((), keys=("model", "servers=1"), figures=("ratio.*", "mean all.*.some"))
    found = [
        {"model": "a", "commit": "1", "ratio": {"x": [0.99, 0.9, 1.1]}, "all": [{"who": "y", "n": 2, "some": [1, 3]}]},
        {"model": "a", "servers": 1, "commit": "2", "ratio": {"x": [0.7, 0.6, 0.8]}},
        {"model": "a", "commit": "3-dirty", "ratio": {"x": [0.5, 0.4, 0.6]}},
        {"model": "a", "commit": "4", "commit_lost": True, "ratio": {"x": [1.5, 0.4, 0.6]}},
        {"model": "b", "commit": "3-dirty", "ratio": {}},
    ]  # fmt: skip
    both, alone = rows.grouped("some", of_two, found)
    assert both.row is found[1] and both.values == {"model": "a", "servers": 1} and len(both.rows) == 4
    assert alone.row is found[4] and "not its commit" in rows.flaw(alone.row)
    assert dict(rows.figures(found[0], "mean all.*.some")) == {"all y n 2 some": 2.0}
    assert [dict(rows.figures(row, "ratio.*"))["ratio x"] for row in both.rows] == [0.99, 0.7, 0.5, 1.5]


def test_rows_with_a_flaw_are_put_aside_once_they_have_been_measured_anew_and_none_is_lost(pages, tmp_path):
    rows, _, earlier, _ = pages
    history = object.__new__(importlib.import_module("pages.freshness").History)
    history.commits = [("aaa1", []), ("aaa2", [])]
    commits = ["fff1", "aaa2-dirty", "aaa2", "fff2", "aaa1-dirty"]  # of these only the third has no flaw
    found = [{"model": "mlp", "commit": commit, "at": at} for at, commit in enumerate(commits)]
    found.append({"model": "cnn", "commit": "aaa1-dirty", "at": 5})  # never measured anew
    (tmp_path / "step_time.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    assert earlier.put_aside(history, tmp_path, dry_run=True) == {"step_time": (2, 3)}
    assert len(rows_of("step_time", tmp_path)) == 6
    assert earlier.put_aside(history, tmp_path) == {"step_time": (2, 3)}
    stay, moved = rows_of("step_time", tmp_path), rows_of("step_time", tmp_path / "earlier")
    assert ([row["at"] for row in stay], [row["at"] for row in moved]) == ([2, 3, 4, 5], [0, 1])
    assert [row["at"] for row in stay + moved if row.get(rows.LOST)] == [3, 0]
    assert earlier.put_aside(history, tmp_path) == {"step_time": (0, 3)}  # nothing is left to do


OF_OPPONENTS = {
    "reading": [
        {"library": "fast", "libraries": ["fast-1.0", "helper-2"],
         "cases": {"64": {"samples_per_second": {"mpitrain": 800.0, "fast 2": 1000.0, "fast 0": 500.0},
                          "mpitrain_over": {"fast 2": [0.8, 0.7, 0.9], "fast 0": [1.6, 1.5, 1.7]}, "best": "fast 2"}}},
        {"library": "slow", "libraries": ["slow-1.0"],
         "cases": {"64": {"samples_per_second": {"mpitrain": 800.0, "slow 0": 400.0},
                          "mpitrain_over": {"slow 0": [2.0, 1.9, 2.1]}, "best": "slow 0"}}},
    ],
    "sparse_tables": [
        {"library": "fast", "libraries": ["fast-1.0"], "rows": 1000, "batch": 16, "hidden": 64,
         "samples_per_second": {"hybrid": 99.0, "fast a": 50.0, "fast b": 100.0},
         "ours_over": {"hybrid": {"fast a": [1.98, 1.9, 2.0], "fast b": [0.99, 0.9, 1.1]}}},
    ],
    "low_communication": [
        {"library": "fast", "libraries": ["fast-1.0"], "model": "mlp", "period": 16,
         "step_ms": {"mpitrain localsgd": 50.0, "fast localsgd": 100.0},
         "averaging_ms": {"mpitrain localsgd": 40.0, "fast localsgd": 20.0},
         "step_ratio": {"localsgd": [0.5, 0.4, 0.6]}, "averaging_ratio": {"localsgd": [2.0, 1.9, 2.1]},
         "weights_apart": {"localsgd": 1.5e-8}},
    ],
    "sweeps": [
        {"library": "fast", "libraries": ["fast-1.0"], "trials": 16, "epochs": 9, "score": 0.97,
         "elapsed_ratio": {"random": [2.0, 1.5, 2.5]}, "median": {
            way: {"idle_share": idle, "elapsed_s": seconds, "samples": 5000, "samples_to_score": reached, "best": 0.98}
            for way, idle, seconds, reached in (
                ("mpitrain random", 0.1, 20.0, None), ("fast random", 0.2, 10.0, 4000), ("fast tpe", 0.05, 9.0, 3000),
            )}},
    ],
}  # fmt: skip


def test_a_page_says_first_where_an_opponent_is_faster(pages, monkeypatch, tmp_path):
    rows, report, _, _ = pages
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    of_a_run = {"commit": "aaa1", "cpu": "some", "num_cores": 2, "date": "today", "torch": "2"}
    for name, found in OF_OPPONENTS.items():
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({**of_a_run, **row}) + "\n" for row in found)
        )
    rows.forget()
    try:
        told = {name: report.PROGRAMS[name]() for name in OF_OPPONENTS}
    finally:
        rows.forget()
    first = {name: text.splitlines()[0] for name, text in told.items()}
    assert first["reading"].startswith(
        "**Faster than ours: fast 2 (samples of 64 B: ours makes 0.80 (0.70 - 0.90)"
    )
    assert "slow" not in first["reading"] and "- fast needed fast-1.0, helper-2" in told["reading"]
    assert (
        first["sparse_tables"].startswith("Nothing")
        and "Not to be told from ours: fast b" in told["sparse_tables"]
    )
    assert "one averaging: ours makes 0.50 (0.48 - 0.53)" in first["low_communication"]
    assert (
        "one step" not in first["low_communication"]
        and "differ from ours by 1.5e-08" in told["low_communication"]
    )
    assert "fast (16 trials of 9 epochs, random: ours makes 0.50 (0.40 - 0.67)" in first["sweeps"]
    assert "**Better than ours: fast random needs 4,000 samples to 0.97, ours -.**" in told["sweeps"]


def test_gloo_is_given_the_flags_that_ours_is_given():
    """`data_parallel` makes both. Of the two programs that call torch's class, one does so for both, one says them."""
    calls = {
        path.stem: path.read_text()
        for path in QUESTIONS.values()
        if "DistributedDataParallel(" in path.read_text()
    }
    assert set(calls) == {"loaded", "compression"}
    assert (
        "**FLAGS_OF_OURS" in calls["compression"] and calls["loaded"].count("DistributedDataParallel(") == 1
    )


def test_every_setting_that_a_page_shows_is_measured_by_one_command(pages):
    """Unless it is a campaign's. All commands together are done in six hours, by what they declare."""
    rows, report, _, measurement = pages
    minutes = 0.0
    for program in report.PROGRAMS:
        found = measurement.declared(measurement.program_of(program))
        assert bool(found.commands) != bool(found.campaign), program
        minutes += sum(command.minutes for command in found.commands)
        for name in {command.writes or program for command in found.commands}:
            its = [command for command in found.commands if (command.writes or program) == name]
            for setting in rows.settings_of(name):
                assert sum(command.measures(setting.values) for command in its) == 1, setting
    assert minutes < 6 * 60


TOY = """
from measuring.measurement import Command, Measurement
MEASUREMENT = Measurement(depends=("code",), keys=("model",), figures=("figure",), commands=(
    Command("python toy.py broken", minutes=1, covers={"model": "broken"}),
    Command("python toy.py a", minutes=1, covers={"model": "a"}),
    Command("python toy.py b", minutes=9, covers={"model": "b"}),
))
"""
TOY_RUN = """
import json, os, sys
assert sys.argv[2] == "--record" and sys.argv[1] != "broken"
row = {"model": sys.argv[1], "commit": "aaa1", "wall_s": 30.0, "figure": 1, "date": "today",
       "launched_as": os.environ["MPITRAIN_BENCHMARK_COMMAND"]}
print(json.dumps(row), file=open("results/toy.jsonl", "a"))
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """`evidence.py` in a folder with one program, of which a row of an old commit is there."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    evidence = importlib.import_module("pages.evidence")
    (tmp_path / "results").mkdir()
    old = {"model": "a", "commit": "bbb1", "figure": 5, "date": "yesterday"}
    (tmp_path / "results" / "toy.jsonl").write_text(json.dumps(old) + "\n")
    (tmp_path / "declared.py").write_text(TOY)
    (tmp_path / "toy.py").write_text(TOY_RUN)
    for module in (evidence, evidence.rows, evidence.freshness):
        monkeypatch.setattr(module, "program_of", lambda name: tmp_path / "declared.py")
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(evidence.rows, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(evidence, "changed_files", list)
    monkeypatch.setattr(evidence, "LOCK", tmp_path / "lock")
    evidence.rows.forget()
    yield evidence
    evidence.rows.forget()


def pieces_of(evidence, most=2):
    """What is to be done where three commits since the old row touched what it rests on, and none since."""
    history = object.__new__(evidence.freshness.History)
    history.commits = [("aaa1", ["code"]), ("ccc1", ["code"]), ("ccc2", ["code"]), ("bbb1", ["page"])]
    evidence.rows.forget()
    return evidence.pieces(["toy"], history, most, under_load=True)


def due(found):
    return [(piece.command.line.split()[-1], piece.estimated_s, piece.age) for piece in found if piece.why]


def test_evidence_runs_what_is_due_and_goes_on_where_it_ended(toy, capsys):
    found = pieces_of(toy)
    assert due(found) == [("broken", 60, math.inf), ("b", 540, math.inf), ("a", 60, 3)]
    assert [line for line, _, _ in due(pieces_of(toy, most=3))] == [
        "broken",
        "b",
    ]  # the old one is young enough
    before = toy.shown_figures(["toy"])
    (failed,) = toy.record(found, minutes=5, wait_s=0, under_load=True)
    assert (
        "toy.py broken" in failed and "toy.py b\n" in capsys.readouterr().out
    )  # left for later: it takes too long
    found = pieces_of(toy)
    assert [line for line, _, _ in due(found)] == ["broken", "b"]  # what is recorded is not run again
    assert [piece.estimated_s for piece in found if piece.command.line == "python toy.py a"] == [
        30
    ]  # and is known
    assert toy.changes(before, toy.shown_figures(["toy"])) == [
        "toy | model a | figure: 5 -> 1, outside of 5 to 5"
    ]
    assert len(toy.record(found, minutes=60, wait_s=0, under_load=True)) == 1
    assert [line for line, _, _ in due(pieces_of(toy))] == ["broken"]


def test_evidence_stops_before_a_command_where_no_row_could_be_recorded(toy, monkeypatch):
    found = pieces_of(toy)

    def interrupted(command):
        raise KeyboardInterrupt

    monkeypatch.setattr(toy, "run", interrupted)
    (told,) = toy.record(found, 60, 0, under_load=True)
    assert told.startswith("interrupted during python toy.py broken")
    monkeypatch.setattr(toy.os, "getloadavg", lambda: (99.0,) * 3)
    (told,) = toy.record(found, 60, 0, under_load=False)
    assert "loaded (99.0)" in told
    monkeypatch.setattr(toy, "changed_files", lambda: ["code.py"])
    (told,) = toy.record(found, 60, 0, under_load=True)
    assert "code.py differ from commit" in told
    with toy.alone(toy.LOCK) as is_alone:
        (told,) = toy.record(found, 60, 0, under_load=True)
        assert is_alone and told.startswith("another run records on this machine")
    loads, slept = iter([99.0, 99.0, 0.0]), []
    assert toy.quiet(60, lambda: next(loads), slept.append) and len(slept) == 2
    assert not toy.quiet(5, lambda: 99.0, slept.append) and len(slept) == 3


@pytest.mark.parametrize("name", sampled(BENCHMARKS, SAMPLE))
def test_it_prints_its_table_and_writes_its_row(name, tmp_path):
    num_ranks, arguments = BENCHMARKS[name]
    python, _ = find_mpi()
    command = [str(python), str(QUESTIONS[name]), *arguments]
    env = {"MPITRAIN_BENCHMARK_RESULTS": str(tmp_path), "CHARNN_HIDDEN": "8", "CHARNN_LAYERS": "2"}
    out = run_ranks(num_ranks, command, env=env).check().stdout
    assert f"written to {tmp_path / name}.jsonl" in out
    CHECKS[name](out, rows_of(name, tmp_path))


def check_loaded(out, rows):
    (row,) = rows
    for figure in ("step", "cpu"):
        assert set(row[f"{figure}_ms"]) == {"mpitrain", "gloo"} and min(row[f"{figure}_ms"].values()) > 0
        assert len(row[f"{figure}_ratio_to_gloo"]) == 3


def check_large(out, rows):
    (row,) = rows
    assert (
        set(row["median_ms"])
        == {"one process", "gloo", "allreduce", "localsgd", "bare"}
        == set(row["faults"])
    )
    assert row["pages"] == "huge" and row["step_ratio"]["gloo"] == [1.0, 1.0, 1.0]  # as `launch` has it
    assert row["averaging_ratio"][0] > 0 and "0.1 million parameters" in out


def check_packing(out, rows):
    (row,) = rows
    assert row["same_bytes"] is True and row["ranks"] == 2 and "same bytes: yes" in out
    assert list(row["ways"]) == [
        "copy",
        "h5py",
        *(f"{n}{s}" for s in ("", " gzip:1") for n in ("one rank", "2 ranks")),
    ]
    assert all(way["mebibytes_per_second"] > 0 for way in row["ways"].values())
    assert row["ways"]["copy"]["of_copy"] == [1, 1, 1]


def check_codec_cost(out, rows):
    (row,) = rows
    assert row["pass_ms"] > 0 and all(f"{name} " in out for name in row["codecs"])
    assert all(one["encode_ms"] > 0 < one["decode_ms"] for one in row["codecs"].values())
    assert 0 < row["codecs"]["threshold"]["message_bytes"] < row["codecs"]["float16"]["message_bytes"]


def check_rates(out, rows):
    (row,) = rows
    assert (row["workers"], row["batch"], len(row["ways"])) == (8, 16, 5)
    assert row["inject"] == ["slow(worker=6,factor=5)", "slow(worker=7,factor=5)"]
    for name, way in row["ways"].items():
        assert name in out
        (only,) = way["sweep"]
        assert len(only["runs"]) == 1 and only["runs"][0]["loss"] == way["loss"]["median"] > 0
        # mean staleness: nothing, N - 1, or (N - 1)/S, less what the beginning and the slow ones leave in flight
        most = {"sync": 0, "async": 7, "async inverse": 7}.get(name, 3.5)
        assert most * 0.7 <= only["runs"][0]["staleness"] <= most
    table = out[out.index("             way") :].splitlines()[:6]
    assert len(table) == 6 and all(len(line) <= 80 for line in table)


def check_reader(out, rows):
    (row,) = rows
    (case,) = row["cases"].values()
    speeds = case["samples_per_second"]
    ways = {"raw", "shuffled", "mpitrain", "loader 0", "loader 2", "loader 4", "rows"}
    assert set(speeds) - {"WebDataset"} == ways
    assert all(value > 0 for value in speeds.values()) and set(case["mpitrain_over"]) == set(speeds) - {
        "mpitrain"
    }
    assert case["mpitrain_over"]["raw"][0] == pytest.approx(
        speeds["mpitrain"] / speeds["raw"]
    )  # of one round
    assert row["computing_20_ms"]["12 KiB"]["ratio"][0] > 0
    tables = out[out.index("samples/s") :].splitlines()
    assert len(tables) >= 6 and all(len(line) <= 80 for line in tables[:6])


def check_reading(out, rows):
    (row,) = rows
    assert row["library"] == "h5py" and set(row["cases"]) == {"12288", "4096", "64"}
    for case in row["cases"].values():
        assert case["best"] in ("h5py 1", "h5py 4") and set(case["mpitrain_over"]) == {"h5py 1", "h5py 4"}


def check_virtual_speed(out, rows):
    (row,) = rows
    assert (row["async"]["pushes"], row["async"]["workers"]) == (600, 30)
    assert (row["allreduce"]["ranks"], row["allreduce"]["steps"]) == (40, 100)
    assert row["async"]["events"] > 4 * 600 and row["async"]["over_heap"][0] > 0 and "us an event" in out


def test_a_prediction_is_judged_by_its_errors_and_by_its_choice(monkeypatch):
    monkeypatch.syspath_prepend(QUESTIONS["prediction"].parent)
    prediction = importlib.import_module("prediction")

    def row(kind, spread="even", **seconds):
        rules = {name: {"sample_s": one[0], "to_target_s": one[1]} for name, one in seconds.items()}
        return {"kind": kind, "rate": "50mbit", "spread": spread, "rules": rules}

    rows = [
        row("measured", a=(9.0, 9.0), b=(9.0, 9.0)),  # before anything was predicted
        row("predicted", a=(1.1, 10.0), b=(0.9, 11.0)),
        row("measured", a=(1.0, 12.0), b=(1.0, 11.0)),
        row("predicted", "one slow", a=(1.0, 1.0), b=(1.0, None)),
    ]
    pairs = prediction.newest(rows)
    (found,) = prediction.judged(pairs)
    assert found["rules"]["a"]["step"] == pytest.approx(0.1) and found["rules"]["b"][
        "target"
    ] == pytest.approx(0)
    assert (found["chosen"], found["best"], found["loss"]) == ("a", "b", pytest.approx(1 / 11))
    text = prediction.compare(rows)
    assert "10.0 % of 2 runs" in text and "9.1 % slower" in text and text.endswith("0 of 1")
    assert prediction.medians([{"sample_s": 1.0, "to_target_s": None}] * 2)["to_target_s"] is None


def test_every_round_of_a_prediction_is_judged_by_what_was_predicted_before(monkeypatch):
    monkeypatch.syspath_prepend(QUESTIONS["prediction"].parent)
    prediction = importlib.import_module("prediction")
    kinds = ["measured", "predicted", "measured", "measured", "predicted", "measured"]
    rows = [{"kind": kind, "rate": "50mbit", "spread": "even", "at": at} for at, kind in enumerate(kinds)]
    found = [[(one["at"], other["at"]) for one, other in pairs] for pairs in prediction.rounds(rows)]
    assert found == [[(1, 2)], [(1, 3)], [(4, 5)]]  # two runs of one prediction are two rounds


def held_out_row(number, rule, kind, **figures):
    made = {name: {"sample_s": seconds[0], "to_target_s": seconds[1]} for name, seconds in figures.items()}
    return {"kind": kind, "condition": {"number": number}, "rule": rule, **made}


def test_a_held_out_cell_stands_as_it_was_run_first_and_the_choice_is_judged_of_whole_conditions(monkeypatch):
    monkeypatch.syspath_prepend(QUESTIONS["held_out"].parent)
    verdict = importlib.import_module("held_out_verdict")
    rules = [f"rule {number}" for number in range(12)]
    rows = []
    for place, rule in enumerate(rules):
        said = (1.2, 10.0 + place)
        rows.append(held_out_row(1, rule, "predicted", simulate=said, plan=(1.0, 20.0 - place)))
        rows.append(held_out_row(1, rule, "measured", measured=(1.0, 10.0 + place if place else None)))
        rows.append(
            held_out_row(1, rule, "measured", measured=(99.0, 99.0))
        )  # run again, which does not count
    rows.append(held_out_row(2, rules[0], "measured", measured=(1.0, 1.0)))  # not predicted, and alone
    found = verdict.verdict(rows, "simulate")
    assert found["step"] == pytest.approx(0.2) and found["num_steps"] == 12
    assert found["target"] == 0.0 and found["num_targets"] == 11  # of those that reached it
    assert verdict.right_rules(rows) == {1: {"rule 1"}}
    assert found["num_right"] == 0 and found["num_conditions"] == 1  # it named rule 0, which misses
    assert verdict.verdict(rows, "plan")["num_right"] == 0 and verdict.chosen(rows, "plan") == {1: "rule 11"}
    assert verdict.always(rows) == ("rule 1", 1)
    assert "wanted: 7 of 8" in verdict.sentence(rows, "plan")


def test_held_out_conditions_are_those_of_the_commit_that_holds_the_model(monkeypatch):
    monkeypatch.syspath_prepend(QUESTIONS["held_out"].parent)
    conditions = importlib.import_module("held_out_conditions")
    commit, seed, drawn = conditions.published()
    assert seed == conditions.seed_of(commit) != conditions.seed_of(commit[::-1])
    told = json.loads(conditions.SEED_FILE.read_text())["conditions"]
    assert [dataclasses.asdict(one) for one in drawn] == told and len(drawn) == 8
    assert [one.job for one in drawn] == 2 * ["cnn", "charnn", "nmt", "ranking"]
    if shutil.which("git") and (ROOT / ".git").exists():
        path = "benchmarks/prediction/held_out_conditions.py"
        held = subprocess.run(["git", "show", f"{commit}:{path}"], cwd=ROOT, capture_output=True, text=True)
        if held.returncode == 0:  # a shallow checkout does not have it
            assert held.stdout == (ROOT / path).read_text()  # what draws has not changed since


def check_server(out, rows):
    assert [(row["megabytes"], row["servers"]) for row in rows] == [(0.0655, 1), (1, 1)]
    for row in rows:
        assert set(row["median_ms"]) == {"ours", "bare mpi4py", "torch RPC", "bytes only"}
        assert all(value > 0 for value in row["median_ms"].values())
        carried = row["megabytes_per_second"]["ours"] * row["median_ms"]["ours"] / 1e3
        assert carried == pytest.approx(2 * row["megabytes"])  # in and out
    assert "RPC / ours" in out


def check_staleness_sensitivity(out, rows):
    assert [row["job"] for row in rows] == ["digits", "pixelcnn"]
    for row, knowing_nothing in zip(rows, (math.log(10), math.log(17)), strict=True):
        one, four = (row["workers"][count] for count in ("1", "4"))
        assert (one["staleness"], one["increase"], one["lost"]) == (0, 0, 0) and 2 < four["staleness"] <= 3
        assert one["runs"][0]["samples"] == four["runs"][0]["samples"]
        assert four["increase"] == pytest.approx(four["loss"] / one["loss"] - 1)
        assert one["loss"] + four["lost"] * (knowing_nothing - one["loss"]) == pytest.approx(four["loss"])
    table = out[out.index("     job") :].splitlines()[:5]
    assert len(table) == 5 and all(len(line) <= 80 for line in table)


def check_sparse_tables(out, rows):
    (row,) = rows
    assert (row["library"], row["rows"], row["batch"]) == ("rpc", 1000, 16)
    assert list(row["samples_per_second"]) == ["sync", "hybrid", "async", "rpc servers"]
    assert all(speed > 0 for speed in row["samples_per_second"].values()) and "hybrid over it" in out
    assert {rule: list(found) for rule, found in row["ours_over"].items()} == {
        rule: ["rpc servers"] for rule in ("sync", "hybrid", "async")
    }


def check_splitting(out, rows):
    (row,) = rows
    assert set(row["ways"]) > {"one process", "allreduce", "sharded"} and len(row["ways"]) == 6
    for name, way in row["ways"].items():
        assert name in out and way["samples_per_second"] > 0
        assert len(way["idle_share"]) == (2 if name.startswith("pipeline") else 0)


def check_sparse(out, rows):
    (row,) = rows
    assert (row["rows"], row["batch"], row["dense_bytes"]) == (1000, 16, 1000 * 16 * 4)
    assert 0 < row["sparse_bytes"] <= 16 * row["words"] * (4 + 16 * 4) and row["sparse_bytes"] % 68 == 0
    assert all(f"{name} " in out for name in row["median_ms"])


def check_tables(out, rows):
    (row,) = rows
    assert (row["rows"], row["batch"], row["dense_bytes"]) == (1000, 16, 1000 * 16 * 4)
    assert row["row_bytes"] < row["pushed_bytes"] and 0 < row["touched_rows"] <= 16 * row["words"]
    assert list(row["median_ms"]) == ["gloo dense", "all-to-all", "rpc", "sync", "hybrid", "async"]
    assert 0 < row["hybrid"]["pushed_bytes"] < row["pushed_bytes"] and len(row["sync_over_hybrid"]) == 3
    assert all(f"{name} " in out for name in row["median_ms"])


def check_after_pause(out, rows):
    (row,) = rows
    ways = ["mpitrain", "mpitrain, 16 bits", "gloo", "bare mpi4py"]
    assert list(row["median_us"]) == ways and (row["bound"], row["busy"], row["ranks"]) == (True, True, 2)
    assert row["num_calls"] == {"0": 6, "1": 6, "1000": 6}
    for way in ways:
        assert all(0 < row["median_us"][way][at] <= row["ninetieth_us"][way][at] for at in row["num_calls"])
        assert f"{way} " in out


def check_push_parts(out, rows):
    (row,) = rows
    assert sum(row["parts_us"].values()) == pytest.approx(row["total_us"])
    for rank in ("worker", "server"):
        assert {"encode the header", "decode the header", "the role", "post a send"} <= {
            part.removeprefix(f"{rank}: ") for part in row["parts_us"]
        }
    assert row["parts_us"]["server: the optimizer's step"] > 0 and row["counted"] <= row["pushes"] == 50


def check_step_time(out, rows):
    (row,) = rows
    ways = {
        "one process",
        "side by side",
        "Allreduce",
        "gloo",
        "allreduce",
        "bare mpi4py",
        "async",
        "DDP alone",
    }
    assert set(row["median_ms"]) == ways
    assert set(row["allreduce_over"]) == {"side by side", "side by side + Allreduce", "DDP alone + Allreduce"}
    assert all(way in out for way in row["median_ms"])


def check_guard_cost(out, rows):
    (row,) = rows
    assert set(row["median_ms"]) == {"plain", "guarded", "again", "comparison"} and row["tensors"] == 50
    assert all(way in out and len(row["ratio_to_plain"][way]) == 3 for way in ("guarded", "again"))


def check_stragglers(out, rows):
    (row,) = rows
    assert row["compute"] == "real compute" and set(row["rules"]) == {"sync()", "torch DDP over gloo"}
    for name, strategy in row["rules"].items():
        (only,) = strategy["runs"]
        assert name in out and strategy["samples_per_second"] > 0
        # the same sleep for every batch of the slow worker, whoever it works for; it does about a fourth of all
        seconds = float(row["inject"].split("seconds=")[1].rstrip(")"))
        assert 0 < only["slept_s"] == pytest.approx(seconds * only["accepted"] / 4, rel=0.1)


def check_beside_checkpoint(out, rows):
    (row,) = rows
    assert (
        len(row["step_ratio"]) == len(row["save_ratio"]) == 3
        and row["num_beside"][0] > 0
        and "torch.save" in out
    )


def check_gathering(out, rows):
    few, many = (one["waiting"] for one in rows[-1]["sizes"])
    assert few <= 10 < many <= 256


CHECKS = {name: globals()[f"check_{name}"] for name in BENCHMARKS}


@pytest.mark.parametrize(("step_s", "slack_steps"), [(0.25, 0.0), (0.07, 1.5), (0.3, 1.5)])
@pytest.mark.parametrize("pause_s", [0.0, 0.125, 0.9])
def test_a_window_loses_the_pause_in_it_and_an_even_one_nothing(monkeypatch, step_s, slack_steps, pause_s):
    """Exactly where the pause begins with the window and a step; else to within the step that is under way there."""
    monkeypatch.syspath_prepend(QUESTIONS["tolerance_cost"].parent)
    lost_s = importlib.import_module("tolerance_cost").lost_s
    even = [step * step_s for step in range(int(100 / step_s))]
    workers = [[at_s + pause_s * (at_s > 50.0) for at_s in even] for _ in range(2)]
    lost = lost_s(workers, 50.0, 2.0)
    assert lost == pytest.approx(pause_s, abs=slack_steps * step_s * (pause_s > 0) + 1e-9)
    assert lost_s(workers, 20.0, 2.0) == pytest.approx(0.0, abs=1e-9)
