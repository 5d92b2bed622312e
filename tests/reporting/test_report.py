"""Reports: what a suite parses, what a crash leaves behind, and that nothing is read between intervals."""

from __future__ import annotations

import io
import json
import math
import os
import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.errors import OutputError
from mpitrain.reporting.fom import fom_line
from mpitrain.reporting.report import (
    NullReport,
    Report,
    Reported,
    default_run_dir,
    explained,
    plain,
    write_json,
)
from mpitrain.training.measure import save_tensors

RESULT = {
    "samples_per_second": 1234.5,
    "status": "ok",
    "job": "digits",
    "strategy_asked": "async(servers=1)",
    "workers": 3,
    "servers": 1,
    "nodes": 1,
    "steps": 450,
    "batch_size": 16,
    "device": "cpu",
    "precision": "float32",
    "seed": 7,
    "synthetic": False,
    "spread": 0.025,
    "warmup_steps": 10,
    "leg": 1,
}


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make(tmp_path: Path, **options: Any) -> tuple[Report, Clock, io.StringIO]:
    clock, stream = Clock(), options.pop("stream", None) or io.StringIO()
    report = Report(Reported(tmp_path / "run", 1000, stream=stream, clock=clock, num_epochs=5, **options))
    return report, clock, stream


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_simulation_says_that_its_seconds_are_virtual():
    assert fom_line(RESULT | {"virtual": True}) == fom_line(RESULT).replace(" schema=", " virtual=1 schema=")


def test_fom_line_is_the_published_one() -> None:
    assert fom_line(RESULT) == (
        "FOM samples_per_second=1234.5 unit=samples/s status=ok job=digits strategy=async(servers=1) "
        "workers=3 servers=1 nodes=1 steps=450 batch_size=16 device=cpu precision=float32 seed=7 synthetic=0 "
        "samples_per_second_per_worker=411.5 spread=0.0250 warmup_steps=10 leg=1 schema=2"
    )


def test_fom_line_has_one_word_per_field_whatever_the_strategy_text() -> None:
    words = {"strategy_asked": "ssp(bound=3,\tservers = 2)", "job": "my job", "device": "", "spread": None}
    line = fom_line({**RESULT, **words})
    assert re.fullmatch(r"FOM( \w+=\S+){19}", line)
    assert " job=my_job strategy=ssp(bound=3,servers=2) " in line
    assert " device=- " in line and math.isnan(float(re.search(r"spread=(\S+)", line)[1]))


@pytest.mark.parametrize("key", sorted(RESULT))
def test_a_result_without_a_fom_key_makes_no_line(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        fom_line({name: value for name, value in RESULT.items() if name != key})


@pytest.mark.parametrize("status", ["ok", "missed", "fail"])
def test_a_status_is_printed_as_it_is(status: str) -> None:
    assert f" status={status} " in fom_line({**RESULT, "status": status})


def test_any_other_status_makes_no_line() -> None:
    with pytest.raises(ValueError, match="'done'"):
        fom_line({**RESULT, "status": "done"})


def test_finish_writes_the_result_and_ends_stdout_with_the_fom_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, _, _ = make(tmp_path)
    report.event("epoch 1", accuracy=0.9)
    report.finish({**RESULT, "accuracy": torch.tensor(0.971, dtype=torch.float64), "histogram": {0: 3, 2: 1}})
    text = (tmp_path / "run" / "result.json").read_text()
    result = json.loads(text)
    assert result["accuracy"] == 0.971 and result["histogram"] == {"0": 3, "2": 1}
    assert list(result) == sorted(result) and text.endswith("}\n")
    assert capsys.readouterr().out == fom_line(RESULT) + "\n"
    assert sorted(os.listdir(tmp_path / "run")) == ["metrics.jsonl", "result.json"]


def test_a_result_that_makes_no_fom_line_leaves_no_success_behind(tmp_path: Path) -> None:
    report, _, _ = make(tmp_path)
    with pytest.raises(ValueError, match="status"):
        report.finish({**RESULT, "status": "perhaps"})
    assert not (tmp_path / "run" / "result.json").exists()
    report.close()


def test_an_earlier_result_is_kept_and_not_taken_for_this_runs(tmp_path: Path) -> None:
    for steps in (1, 2):
        report, _, _ = make(tmp_path)
        assert not (tmp_path / "run" / "result.json").exists()
        report.finish({**RESULT, "steps": steps})
    report, _, _ = make(tmp_path)
    report.close()
    kept = [
        json.loads((tmp_path / "run" / name).read_text())["steps"]
        for name in ("result-1.json", "result-2.json")
    ]
    assert kept == [1, 2] and not (tmp_path / "run" / "result.json").exists()


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "result.json", {"a": 1})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space"):
        write_json(tmp_path / "result.json", {"a": 2})
    assert json.loads((tmp_path / "result.json").read_text()) == {"a": 1}


def test_metrics_continue_where_an_earlier_run_stopped(tmp_path: Path) -> None:
    for name in ("first", "second"):
        report, _, _ = make(tmp_path)
        report.event(name)
        report.close()
    assert [row["event"] for row in rows(tmp_path)] == ["first", "second"]


def test_progress_inside_the_interval_does_not_read_the_loss(tmp_path: Path) -> None:
    class Untouchable:
        def tolist(self) -> float:
            raise AssertionError("read the loss off its device")

        __float__ = tolist

    report, clock, stream = make(tmp_path, interval_s=1.0)
    clock.now_s += 0.999
    report.progress(10, 1, 1, Untouchable())
    assert rows(tmp_path) == [] and stream.getvalue() == ""
    clock.now_s += 0.001
    report.progress(20, 2, 1, torch.tensor(0.5))
    report.progress(30, 3, 1, Untouchable())
    assert [row["step"] for row in rows(tmp_path)] == [2]


def test_the_rate_is_that_of_the_last_interval(tmp_path: Path) -> None:
    report, clock, _ = make(tmp_path, interval_s=2.0)
    for samples in (100, 400, 420):
        clock.now_s += 2.0
        report.progress(samples, samples // 10, 1, 0.1)
    assert [row["samples_per_second"] for row in rows(tmp_path)] == [50.0, 150.0, 10.0]
    assert [row["t"] for row in rows(tmp_path)] == [2.0, 4.0, 6.0]


def test_a_log_gets_dated_plain_lines(tmp_path: Path) -> None:
    report, clock, stream = make(tmp_path)
    clock.now_s += 5.0
    report.progress(600, 120, 2, 0.41234, staleness=1.5)
    report.event("epoch 2", accuracy=0.951)
    date = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(date + r" step 120 epoch 2/5 loss 0\.4123 120 samples/s staleness 1\.5", first)
    assert re.fullmatch(date + r" epoch 2 accuracy 0\.951", second)


def test_a_terminal_gets_one_line_that_fits_and_events_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    report, clock, stream = make(tmp_path, stream=Terminal())
    for step in (1, 2):
        clock.now_s += 1.0
        report.progress(step * 250, step, 1, 0.25, note="x" * 80)
    report.event("epoch 1", accuracy=0.5)
    report.close()
    drawn = stream.getvalue()
    assert drawn.count("\n") == 1 and drawn.endswith("\r\x1b[Kepoch 1 accuracy 0.5\n")
    lines = [part.removesuffix("\x1b[K") for part in drawn.split("\r") if part.startswith(" ")]
    assert len(lines) == 2 and all(len(line) == 59 for line in lines)
    assert lines[1].startswith(" 50% [==========          ] step 2 epoch 1/5 loss 0.25")


def test_a_dumb_terminal_is_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    report, clock, stream = make(tmp_path, stream=Terminal(), interval_s=1.0)
    clock.now_s += 1.0
    report.progress(1, 1, 1, 0.5)
    assert "\r" not in stream.getvalue() and stream.getvalue().endswith("\n")


def test_behind_mpirun_the_launchers_terminal_counts_for_stderr_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPITRAIN_TERMINAL", "50")
    report, clock, stream = make(tmp_path, interval_s=1.0)
    told = Report(Reported(tmp_path / "told", 1000, clock=clock))
    for _ in range(2):
        clock.now_s += 1.0
        report.progress(1, 1, 1, 0.5, note="x" * 80)
        told.progress(1, 1, 1, 0.5, note="x" * 80)
    told.close()
    drawn = capsys.readouterr().err
    assert "\r" not in stream.getvalue()
    assert [len(part.removesuffix("\x1b[K")) for part in drawn.split("\r")] == [0, 49, 49, 0]


def test_quiet_keeps_the_files_and_the_fom_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, clock, stream = make(tmp_path, quiet=True)
    clock.now_s += 10
    report.progress(1, 1, 1, 0.5)
    report.event("epoch 1")
    report.finish(RESULT)
    assert stream.getvalue() == "" and len(rows(tmp_path)) == 2
    assert capsys.readouterr().out.startswith("FOM ")


def test_quiet_or_not_why_a_run_has_failed_is_told(tmp_path: Path) -> None:
    for quiet in (True, False):
        report, _, stream = make(tmp_path, quiet=quiet)
        report.finish({**RESULT, "status": "fail", "failure": "rank 1 (worker, step 3): loss is nan"})
        assert (
            stream.getvalue().count("loss is nan; lower the learning rate") == quiet
        )  # otherwise `end` tells it
    assert explained("accuracy is 0.5") == "accuracy is 0.5"


def test_a_row_is_on_disk_before_anything_else_happens(tmp_path: Path) -> None:
    report, _, _ = make(tmp_path)
    report.event("start")
    assert [row["event"] for row in rows(tmp_path)] == ["start"]  # neither closed nor flushed by us


def test_nonfinite_numbers_stay_strict_json(tmp_path: Path) -> None:
    report, clock, stream = make(tmp_path)
    clock.now_s += 5
    report.progress(1, 1, 1, torch.tensor(math.nan), norm=np.float32(math.inf))
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert row["loss"] == "nan" and row["norm"] == "inf" and "loss nan" in stream.getvalue()


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


@given(
    st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)
)
def test_plain_survives_a_round_trip_through_strict_json(value: Any) -> None:
    cleaned = plain(value)
    assert json.loads(json.dumps(cleaned, allow_nan=False)) == cleaned


@given(st.integers(-(2**31), 2**31 - 1), st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_plain_reads_arrays_and_tensors(whole: int, real: float) -> None:
    value = {"a": np.int64(whole), "b": torch.tensor([real]), "c": (np.float32(real), Path("x/y")), 3: True}
    assert plain(value) == {"a": whole, "b": [real], "c": [real, "x/y"], "3": True}


def test_the_null_report_touches_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = NullReport()
    report.progress(1, 1, 1, object(), field=object())
    report.event("x", a=object())
    report.finish({})
    report.close()
    captured = capsys.readouterr()
    assert captured.out == captured.err == "" and os.listdir(tmp_path) == []


def test_the_run_directory_is_private(tmp_path: Path) -> None:
    report, _, _ = make(tmp_path)
    report.close()
    assert (tmp_path / "run").stat().st_mode & 0o077 == 0


def test_a_default_run_directory_is_new_and_named_after_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20261121-014003")
    first = default_run_dir("../my job")
    first.mkdir(parents=True)
    second = default_run_dir("../my job")
    assert [str(first), str(second)] == ["runs/my-job-20261121-014003", "runs/my-job-20261121-014003-2"]
    monkeypatch.setenv("MPITRAIN_RUN_DIR", "/scratch/run")
    assert default_run_dir("job") == Path("/scratch/run")


def test_a_full_disk_loses_rows_with_a_word_and_never_the_end_of_a_run_without_one(tmp_path):
    stream = io.StringIO()
    report = Report(Reported(tmp_path, 10, stream=stream))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        for number in range(5):
            report.event("epoch", text="x" * 50, number=number)
        with pytest.raises(
            OutputError, match="cannot write .*result.json: File too large; free space, then go on"
        ):
            report.finish(RESULT)
        with pytest.raises(OutputError, match="cannot write .*model.safetensors: .*File too large"):
            save_tensors({"w": torch.zeros(1000)}, tmp_path / "model.safetensors", {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert stream.getvalue().count("rows of it are lost") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl"}  # nothing half-written


def test_what_came_before_the_first_step_slows_no_rate_and_no_forecast(tmp_path: Path) -> None:
    report, clock, stream = make(tmp_path)
    clock.now_s += 40.0
    report.begin()
    clock.now_s += 5.0
    report.progress(500, 50, 1, 0.1)
    began, row = rows(tmp_path)
    assert (began["event"], began["t"], began["total_samples"], began["epochs"]) == (
        "training",
        40.0,
        1000,
        5,
    )
    assert row["samples_per_second"] == 100.0 and row["t"] == 45.0
    assert "training" not in stream.getvalue() and "100 samples/s" in stream.getvalue()
    assert report._left_s(500, clock.now_s) == pytest.approx(5.0)


def test_a_run_of_seconds_has_a_curve_and_a_long_one_no_more_rows_than_lines(tmp_path: Path) -> None:
    report, clock, stream = make(tmp_path)
    report.begin()
    for step in range(1, 10001):
        clock.now_s += 0.05
        report.progress(step, step, 1, 0.1)
    report.close()
    seconds = [row["t"] for row in rows(tmp_path) if row["event"] == "progress"]
    assert sum(one <= 5 for one in seconds) >= 20
    gaps = [after - before for before, after in zip(seconds, seconds[1:], strict=False)]
    assert gaps[-1] >= 4.9 and len(seconds) < 400
    assert 90 < len(stream.getvalue().splitlines()) <= 100  # one in 5 s, as before


def test_an_event_of_many_metrics_stays_within_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    report, _, stream = make(tmp_path, stream=Terminal())
    report.event("validation", epoch=1, samples=10, **{f"recall/class_{one}": one / 60 for one in range(60)})
    assert stream.getvalue() == "validation epoch 1 samples 10 recall/class_* 0 to 0.9833 (60)\n"
    assert len(rows(tmp_path)[0]) > 60, "the file has them all"
