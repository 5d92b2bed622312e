"""Logs and callbacks get the rows of `metrics.jsonl`, and a run that goes on repeats none."""

import io

import pytest

import mpitrain as mt
from mpitrain.cli.main import main
from mpitrain.errors import UsageError
from mpitrain.reporting.listeners import check_callbacks, check_installed, read_logs
from mpitrain.reporting.logs.csv_log import CsvLog
from mpitrain.reporting.report import Report, Reported
from tests import toy
from tests.reporting.logs import points, rows_of, table


class Heard:
    """Notes every row, by the method that got it."""

    def __init__(self):
        self.rows = []

    def on_step(self, row):
        self.rows.append(("on_step", row))

    def on_validation(self, row):
        self.rows.append(("on_validation", row))

    def on_checkpoint(self, row):
        self.rows.append(("on_checkpoint", row))

    def of(self, method):
        return [row for name, row in self.rows if name == method]


def report(path, **options):
    return Report(Reported(path, 100, quiet=True, stream=io.StringIO(), **options))


def steps(one, first, last, samples=10):
    for step in range(first, last + 1):
        one.progress(step * samples, step, 1, 1.0 / step)


def test_callbacks_get_the_rows_of_the_file(tmp_path):
    heard = Heard()
    one = report(tmp_path, callbacks=[heard], log_every=2)
    steps(one, 1, 5)
    one.event("validation", epoch=1, samples=50, accuracy=0.5)
    one.event("note", samples=50)
    one.event("end", status="ok", samples=50, accuracy=0.75, model="m")
    one.close()
    written = rows_of(tmp_path)
    assert [row["event"] for row in written] == ["progress", "progress", "validation", "note", "end"]
    assert written[0].pop("schema") == 1 and not any("schema" in row for row in written)
    assert heard.of("on_step") == written[:2] and [row["step"] for row in written[:2]] == [2, 4]
    assert heard.of("on_validation") == [written[2], written[4]]


def test_the_end_of_a_run_that_measured_nothing_is_no_validation(tmp_path):
    heard = Heard()
    one = report(tmp_path, callbacks=[heard])
    one.event("end", status="ok", samples=50, model="m")
    one.close()
    assert heard.rows == []


def test_a_checkpoint_is_reported_when_all_its_parts_are_there(tmp_path):
    heard = Heard()
    one = report(tmp_path, callbacks=[heard], log_every=1)
    folder = tmp_path / "checkpoints" / "000000000020"
    folder.mkdir(parents=True)
    (folder / "shard-0.json").touch()
    one.checkpoint(folder, ["shard-0", "own-1"])
    one.checkpoint(tmp_path / "checkpoints" / "000000000010", ["shard-0"])  # there is a newer one meanwhile
    steps(one, 3, 3)
    assert heard.of("on_checkpoint") == []
    (folder / "own-1.json").touch()
    steps(one, 4, 5)
    one.close()
    (row,) = heard.of("on_checkpoint")
    assert row["samples"] == 20 and row["folder"] == str(folder) and row in rows_of(tmp_path)


def test_without_an_interval_in_steps_rows_follow_the_clock(tmp_path):
    now = [0.0]
    one = report(tmp_path, clock=lambda: now[0], interval_s=5.0, resumed_at=100)
    for step in range(1, 12):
        now[0] += 1.0
        one.progress(100 + 10 * step, step, 1, 0.5)
    one.close()
    assert [(row["step"], row["samples_per_second"]) for row in rows_of(tmp_path)] == [(5, 10.0), (10, 10.0)]


def test_an_exception_of_a_callback_goes_to_the_caller(tmp_path):
    class Wrong:
        def on_step(self, row):
            raise OSError("the user's own")

    one = report(tmp_path, callbacks=[Wrong()], log_every=1)
    with pytest.raises(OSError, match="the user's own"):
        steps(one, 1, 1)
    one.close()


def test_the_table_gets_columns_as_they_come_up(tmp_path):
    one = report(tmp_path, logs=["csv"], log_every=1)
    one.event("start", strategy="async()")
    steps(one, 1, 2)
    one.event("validation", epoch=1, samples=20, accuracy=0.5)
    one.progress(30, 3, 2, float("nan"), staleness=1.5)
    one.close()
    found = table(tmp_path)
    assert [row["event"] for row in found] == ["progress", "progress", "validation", "progress"]
    assert [row["accuracy"] for row in found] == ["", "", "0.5", ""]
    assert found[3]["loss"] == "nan" and found[3]["staleness"] == "1.5" and found[0]["staleness"] == ""


@pytest.mark.parametrize("log", ["csv", "tensorboard"])
def test_a_run_that_goes_on_repeats_no_step(tmp_path, log):
    pytest.importorskip("tensorboard" if log == "tensorboard" else "csv")

    def start(first, last, factor, **options):
        one = report(tmp_path, logs=[log], log_every=1, **options)
        for step in range(first, last + 1):
            one.progress(step * 10, step, 1, factor * step)
        one.close()

    def found():
        if log == "csv":
            return [(int(row["samples"]), float(row["loss"])) for row in table(tmp_path)]
        return points(tmp_path, "train/loss")

    start(1, 5, 1.0)
    start(4, 7, 2.0, resumed_at=30)
    assert found() == [(10, 1), (20, 2), (30, 3), (40, 8), (50, 10), (60, 12), (70, 14)]
    start(8, 9, 3.0, resumed_at=None)  # another rank reports from here on
    assert found()[-3:] == [(70, 14), (80, 24), (90, 27)] and len(found()) == 9
    start(1, 2, 4.0)  # a new run in the same directory
    assert found() == [(10, 4), (20, 8)]
    if log == "csv":
        assert len((tmp_path / "metrics-1.csv").read_text().splitlines()) == 10


def test_a_log_that_cannot_be_written_costs_its_rows_and_one_warning(tmp_path, monkeypatch):
    def full(self, row):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CsvLog, "row", full)
    stream = io.StringIO()
    one = Report(Reported(tmp_path, 100, stream=stream, logs=["csv"], log_every=1))
    steps(one, 1, 3)
    one.close()
    assert stream.getvalue().count("cannot be written (No space left on device)") == 1
    assert len(rows_of(tmp_path)) == 3


def test_names_of_logs():
    assert read_logs(None) == () and read_logs("csv") == ("csv",)
    assert read_logs("csv, tensorboard") == read_logs(["csv", "tensorboard", "csv"]) == ("csv", "tensorboard")
    for name in ("cvs", "wb", "mlruns", ""):
        with pytest.raises(UsageError, match="choose csv, mllog, tensorboard, mlflow or wandb"):
            read_logs(name)
    with pytest.raises(UsageError, match="choose csv, mllog, tensorboard, mlflow or wandb.*'csv'"):
        toy.make_job(log="cvs")


def test_a_missing_package_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_installed(["csv"])
    for name in ("tensorboard", "mlflow", "wandb"):
        with pytest.raises(UsageError, match=rf"needs the package {name}: pip install mpitrain\[{name}\]$"):
            check_installed(["csv", name])
    with pytest.raises(UsageError, match=r"pip install mpitrain\[tensorboard\]$"):
        mt.simulate(toy.make_job(log="tensorboard"), mt.Async(), workers=2, quiet=True)


def test_callbacks_that_nothing_would_call_are_refused():
    class Misspelt:
        def on_steps(self, row):
            pass

    for callbacks, said in [
        (Heard(), "must be a list"), ("text", "must be a list"), ([Heard], r"is a class.*Heard\(\)"),
        ([Misspelt()], "'on_steps', which nothing calls.*on_step"), ([object()], "none of the methods on_step"),
    ]:  # fmt: skip
        with pytest.raises(UsageError, match=said):
            toy.make_job(callbacks=callbacks)
    check_callbacks([Heard()])


@pytest.mark.parametrize(
    "strategy", [mt.Async(servers=2), mt.LocalSGD(period=2), mt.Decentralized()], ids=str
)
def test_a_simulation_has_them_too(tmp_path, strategy):
    heard = Heard()
    job = toy.make_job(callbacks=[heard], log="csv", log_every=1, validate=toy.Memory())
    mt.simulate(job, strategy, workers=2, quiet=True, run_dir=str(tmp_path))
    written = rows_of(tmp_path)
    assert heard.of("on_step") == [row for row in written if row["event"] == "progress"] != []
    assert [row["event"] for row in heard.of("on_validation")] == ["validation", "end"]
    found = table(tmp_path)
    assert [float(row["virtual_s"]) for row in found if row["event"] == "progress"] == [
        row["virtual_s"] for row in written if row["event"] == "progress"
    ]


def test_the_command_line_takes_them(tmp_path, capsys):
    (tmp_path / "job.py").write_text("from tests import toy\njob = toy.make_job(log='csv')\n")
    given = ["simulate", str(tmp_path / "job.py"), "--strategy", "async()", "--workers", "2", "--quiet"]
    assert main([*given, "--run-dir", str(tmp_path / "run"), "--log", "csv", "--log-every", "4"]) == 0
    assert len([row for row in table(tmp_path / "run") if row["event"] == "progress"]) == 4
    assert main([*given, "--log", "wb"]) == 2
    assert "choose csv, mllog, tensorboard, mlflow or wandb" in capsys.readouterr().err
