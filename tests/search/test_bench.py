"""`mpitrain bench`: which runs, in which order, and what is said of them."""

import json
import re

import pytest

import mpitrain as mt
from mpitrain.cli.main import main
from mpitrain.errors import UsageError
from mpitrain.job import Overrides
from mpitrain.search.bench.page import bench_page
from mpitrain.search.bench.runs import command, sent_bytes
from mpitrain.search.bench.settings import Request, Setting, TrainArgs, in_turns, load
from mpitrain.search.bench.summary import main_metric, summed_up, verdicts, with_efficiency
from mpitrain.search.bench.text import bench_text
from tests.ranks import ROOT

JOB = str(ROOT / "jobs" / "digits.py")


def request(*strategies, workers=(1, 2, 4), words=(), **options):
    return Request(JOB, strategies, workers, train=TrainArgs(words, Overrides(synthetic=True)), **options)


def run(rate, **fields):
    plain = {
        "spread": 0.1,
        "steps": 5,
        "num_bytes": 8,
        "staleness_mean": None,
        "metrics": {},
        "to_target": None,
    }
    return {"samples_per_second": rate, "failure": "", "validations": [], **plain, **fields}


def row(strategy, workers, *runs, virtual=False):
    begun = {"strategy": strategy, "workers": workers, "virtual": virtual, "batch_size": 16}
    return summed_up(begun | {"runs": list(runs)})


def test_every_worker_takes_the_jobs_batch_or_all_together_the_given_one():
    _, weak = load(request("allreduce", "pipeline(stages=2)"))
    assert [(one.asked, one.workers, one.batch_size) for one in weak] == [
        ("allreduce", 1, 16), ("allreduce", 2, 16), ("allreduce", 4, 16), ("pipeline(stages=2)", 1, None),
        ("pipeline(stages=2)", 2, 16), ("pipeline(stages=2)", 4, 16),
    ]  # fmt: skip
    _, strong = load(request("allreduce", "pipeline(stages=2)", global_batch_size=32))
    assert [one.batch_size for one in strong] == [32, 16, 8, None, 32, 16]  # two stages share a batch
    assert all(one.row()["global_batch_size"] in (32, None) for one in strong)
    _, uneven = load(request("allreduce", workers=(2, 3), global_batch_size=32))
    assert uneven[0].refused == "" and "32 cannot be divided among 3 batches" in uneven[1].refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"train": TrainArgs(overrides=Overrides(strategy="sync()"))}, "use --strategies"),
        (
            {"train": TrainArgs(overrides=Overrides(resume="auto", run_dir="r"))},
            "--run-dir is set for every run",
        ),
        (
            {"train": TrainArgs(overrides=Overrides(batch_size=4)), "global_batch_size": 8},
            "leave one of them out",
        ),
        ({"workers": ()}, "nothing to measure"),
        ({"strategies": ("pipeline(stages=3)",)}, "3"),
        ({"strategies": ("ringreduce",)}, "unknown name 'ringreduce'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_run(options, said):
    options = {
        "strategies": ("allreduce",),
        "workers": (1,),
        "train": TrainArgs(overrides=Overrides(synthetic=True)),
    } | options
    with pytest.raises(UsageError, match=re.escape(said)):
        load(Request(JOB, **options))


def test_settings_take_turns_and_another_one_begins_each_time():
    _, settings = load(request("allreduce", "pipeline(stages=2)", virtual_workers=(8,)))
    assert list(in_turns(settings, 3)) == [
        *((0, 0), (1, 0), (2, 0), (4, 0), (5, 0)),
        *((1, 1), (2, 1), (4, 1), (5, 1), (0, 1)),
        *((2, 2), (4, 2), (5, 2), (0, 2), (1, 2)),
    ]


def test_a_run_is_started_as_a_person_would(tmp_path):
    asked = request("async(servers=2)", words=("--synthetic", "--steps", "3"), mpi="openmpi")
    words = command(asked, load(asked)[1][2], 7, tmp_path)
    assert words[2:10] == [
        "mpitrain",
        "launch",
        "--mpi",
        "openmpi",
        "-n",
        "6",
        "train",
        JOB,
    ]  # 4 workers, 2 servers
    assert words[10:13] == ["--synthetic", "--steps", "3"]
    assert words[13:] == [
        *("--strategy", "async(servers=2)", "--batch-size", "16", "--seed", "7", "--run-dir", str(tmp_path)),
        "--quiet",
    ]


def test_efficiency_is_of_the_same_strategy_on_the_fewest_workers():
    rows = [row("a", 4, run(200.0)), row("b", 2, run(50.0)), row("a", 1, run(100.0)), row("b", 4, run(75.0))]
    found = with_efficiency([*rows, row("a", 8, run(4.0), virtual=True) | {"speed_up": 6.0}])
    assert [(one["efficiency"], one["speed_up"]) for one in found] == [
        (0.5, 2.0), (1.0, 2.0), (1.0, 1.0), (0.75, 3.0), (0.75, 6.0),
    ]  # fmt: skip


def test_without_a_baseline_or_another_run_nothing_is_claimed():
    """One number of workers has nothing to be faster than, and one run does not spread over seeds."""
    found = with_efficiency([row("a", 2, run(12345.6)), row("b", 2, run(50.0)), row("b", 4, run(80.0))])
    assert [one["efficiency"] for one in found] == [None, 1.0, 0.8]
    assert [one["spread"] for one in found] == [None, None, None]
    whole = {
        "job": "j", "scaling": "weak", "repeats": 1, "metric": None, "verdicts": [], "rows": found[:1],
        "compute": "", "network": "",
    }  # fmt: skip
    whole["rows"] = [one | {"batch_size": 8, "strategy": "a"} for one in whole["rows"]]
    line = next(line for line in bench_text(whole).splitlines() if line.startswith("a "))
    assert line.split()[-4:] == ["-", "-", "-", "8B"]  # spread, speed-up, efficiency
    whole["rows"].append({"strategy": "b", "workers": 1, "virtual": True, "refused": "too few"})
    page = bench_page(whole)
    assert "<td>100.0 %</td>" not in page and ">12,346<" in page and "b, 1 virtual worker: too few" in page


def test_means_and_spreads_are_of_the_runs_that_succeeded():
    met = {"seconds": 4.0, "samples": 100}
    failed = {"failure": "rank 1: boom"}
    found = row(
        "a",
        2,
        run(90.0, metrics={"accuracy": 0.9}, to_target=met),
        failed,
        run(110.0, metrics={"accuracy": 0.8}),
    )
    assert found["samples_per_second"] == 100 and found["samples_per_second_per_worker"] == 50
    assert found["spread"] == pytest.approx(200**0.5 / 100)  # deviation of 90 and 110: sqrt(200)
    assert found["metrics"]["accuracy"]["mean"] == pytest.approx(0.85)
    assert (found["num_met"], found["num_runs"], found["to_target"]) == (1, 2, met)
    assert "samples_per_second" not in row("a", 2, failed)


@pytest.mark.parametrize(
    ("target", "metric"),
    [
        ({"accuracy": 0.9}, ("accuracy", False)),
        ({"validation_loss": "<1"}, ("validation_loss", True)),
        ({"bits": "<2", "accuracy": 0.9}, ("accuracy", False)),  # bits were not measured
        ({}, ("accuracy", False)),
    ],
)
def test_the_metric_that_a_job_is_about(target, metric):
    measured = row("a", 1, run(1.0, metrics={"validation_loss": 1.0, "accuracy": 0.5}))
    assert main_metric(target, [measured]) == metric


def test_a_difference_within_the_spread_of_seeds_is_none():
    def of(strategy, *accuracies, rate=100.0):
        return row(strategy, 2, *(run(rate, metrics={"accuracy": one}) for one in accuracies))

    rows = [of("first", 0.90, 0.92), of("alike", 0.91, 0.92, rate=150.0), of("worse", 0.50, 0.52, rate=50.0)]
    alike, worse = verdicts(with_efficiency(rows), {"accuracy": 0.9})
    (of_one,) = verdicts(with_efficiency([of("first", 0.9), of("other", 0.8)]), {})
    assert of_one["is_clear"] is None
    assert alike["faster"] == [1.5, 1.5, 1.5] and not alike["is_clear"]
    assert alike["difference"] == pytest.approx(0.005) and alike["against"] == "first"
    assert worse["is_clear"] and worse["difference"] == pytest.approx(-0.4)
    (less,) = verdicts(with_efficiency([rows[0], rows[2]]), {"accuracy": "<0.9"})
    assert less["difference"] == pytest.approx(0.4)  # a better model, where less is better


def test_ratios_are_of_runs_of_the_same_turn():
    rows = with_efficiency([row("a", 2, run(100.0), run(50.0)), row("b", 2, run(200.0), run(100.0))])
    (found,) = verdicts(rows, {})
    assert found["faster"] == [2.0, 2.0, 2.0]  # the machine was half as fast in the second turn


def test_bytes_are_those_of_the_busiest_or_of_the_ring():
    ring = Setting(mt.AllReduce(), "allreduce", 4, False, 16)
    assert sent_bytes({"ranks": [{}], "steps": 10}, ring, 100) == 10 * 100 * 2 * 3 // 4
    assert sent_bytes({"ranks": [{"sent_bytes": 5}, {"sent_bytes": 7}]}, ring, 100) == 7
    servers = [{"pushed_bytes": 1, "replied_bytes": 2}, {"pushed_bytes": 5, "replied_bytes": 2}, {}]
    assert sent_bytes({"ranks": servers}, ring, 100) == 7
    split = Setting(mt.Pipeline(stages=2), "pipeline", 4, False, 16)
    assert sent_bytes({"ranks": [{}], "steps": 10}, split, 100) is None


@pytest.mark.usefixtures("warm_children")
def test_a_job_is_measured_under_mpi_and_in_virtual_time(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--strategies", "allreduce", "async(servers=1, placement='spread')", "pipeline(stages=2)"]
    words += [
        "--workers",
        "1",
        "--virtual-workers",
        "4",
        "--compute",
        "constant(0.5, jitter=0)",
        "--repeats",
        "1",
        "--synthetic",
    ]
    page, folder = tmp_path / "page.html", tmp_path / "bench"
    words += ["--train-args", "--steps 2", "--run-dir", str(folder), "--html", str(page)]
    assert main(["bench", JOB, *words]) == 0
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if line.startswith("FOM ")]
    assert [re.search(r"strategy=(\S+)", line)[1] for line in lines[:2]] == [
        "allreduce", "async(servers=1,placement='spread')",
    ]  # fmt: skip
    assert len(lines) == 5 and sum(" virtual=1 " in line for line in lines) == 3
    found = json.loads((folder / "bench.json").read_text())
    shown = {(one["strategy_asked"], one["workers"]): one for one in found["rows"]}
    assert "2" in shown["pipeline(stages=2)", 1]["refused"]
    assert shown["allreduce", 1]["runs"][0]["samples"] == 2 * 16
    virtual = shown["allreduce", 4]
    assert virtual["samples_per_second"] == pytest.approx(4 * 16 / 0.5, rel=0.01) and virtual["steps"] == 2
    assert all(len(line) <= 80 for line in bench_text(found).splitlines())
    assert re.search(r"^allreduce\(\) +4v +16 +128 ", bench_text(found), re.MULTILINE)
    assert "pipeline(), 1 worker: " in err
    assert page.read_text().count("<svg") >= 2 and "allreduce() (virtual)" in page.read_text()


@pytest.mark.usefixtures("warm_children")
def test_a_run_that_fails_is_named_and_ends_no_other(tmp_path, capsys):
    text, job = (ROOT / "jobs" / "digits.py").read_text(), tmp_path / "fails.py"
    loss = "    return nn.functional.cross_entropy"
    job.write_text(text.replace(loss, f"    assert len(batch['y']) > 8, 'too few'\n{loss}"))
    words = ["--workers", "1,2", "--global-batch-size", "16", "--repeats", "1", "--synthetic", "--quiet"]
    folder = tmp_path / "bench"
    assert main(["bench", str(job), *words, "--train-args", "--steps 1", "--run-dir", str(folder)]) == 1
    good, bad = json.loads((folder / "bench.json").read_text())["rows"]
    assert good["num_runs"] == 1 and good["samples_per_second"] > 0 and good["batch_size"] == 16
    failures = bad["runs"][0]["failure"].split("; ")
    said = [re.fullmatch(r"rank [01] \(worker, step 0\): AssertionError: too few", one) for one in failures]
    assert all(said) and "samples_per_second" not in bad
    assert capsys.readouterr().out.count("FOM ") == 1
