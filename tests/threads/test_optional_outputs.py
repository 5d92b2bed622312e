"""What a run can do without, deleted, filled and broken while it trains: it comes to its end all the same."""

import io
import json
import resource
import shutil
import signal
import sys

import pytest
import torch

import mpitrain as mt
from mpitrain.reporting import mllog
from mpitrain.reporting.logs import csv_log
from mpitrain.roles import replay
from mpitrain.system import optional, saying
from mpitrain.system.saying import escape_what_cannot_be_printed, write
from mpitrain.values import parse
from tests import toy


def train(path, text="async()", during=None, **options):
    """A run that calls `during[n]` in its n-th batch."""
    steps = []

    def loss(model, batch):
        steps.append(1)
        if during and len(steps) in during:
            during[len(steps)]()
        return toy.square_loss(model, batch)

    job = toy.make_job(loss=loss, epochs=4, batch_size=4, log_every=1, **options)
    return mt.train(job, parse(text, "strategy"), threads=2, run_dir=str(path))


def is_whole(result, path):
    assert result["status"] == "ok" and result["samples"] == 4 * 48
    assert json.loads((path / "result.json").read_text())["status"] == "ok"
    assert (path / "model.safetensors").is_file()


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    """Nor lost: a full file system takes nothing for the standard output either, which commands of later tests tell."""
    monkeypatch.setattr(optional, "_told", set())
    monkeypatch.setattr(saying, "_lost", "")


def delete(folder):
    """All of it, whatever others write into it meanwhile."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("text", ["async(servers=2)", "allreduce()", "localsgd(period=2)", "decentralized()"])
def test_a_run_whose_directory_is_deleted_leaves_its_model_and_its_result(text, tmp_path, capfd):
    path = tmp_path / "run"
    during = {6: lambda: delete(path)}
    is_whole(train(path, text, during, log="csv,mllog", checkpoint_every="20 samples"), path)
    told = capfd.readouterr().err
    for shard in range(2):
        assert told.count(f"arrivals-{shard}.json cannot be written") == text.startswith("async")


def test_a_file_system_that_is_full_for_a_while_ends_nothing(tmp_path, monkeypatch):
    told = io.StringIO()  # a file would be full, too
    monkeypatch.setattr(sys, "stderr", told)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    path, during = tmp_path / "run", {}
    during[6] = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    during[30] = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)
    try:
        result = train(path, during=during, log="csv,mllog", checkpoint_every="80 samples")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    is_whole(result, path)
    assert sum(row.get("checkpoints", {}).get("num_failed", 0) for row in result["ranks"])
    for name in ("metrics.jsonl", "metrics.csv"):
        assert told.getvalue().count(f"{name} cannot be written (File too large)") == 1, name


def fail(*arguments, **options):
    raise KeyError("something of its own")


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ((csv_log.CsvLog, "row"), "metrics.csv"),
        ((csv_log.CsvLog, "close"), "metrics.csv"),
        ((mllog.MlLog, "row"), mllog.MLLOG_FILE),
        (("mpitrain.roles.replay.os.replace",), "arrivals-0.json"),
        (("mpitrain.training.accounting.begin_leg",), "legs.jsonl"),
        (("mpitrain.training.accounting.end_leg",), "legs.jsonl"),
    ],
)
def test_what_breaks_in_a_way_of_its_own_is_told_once_and_ends_nothing(
    broken, told, tmp_path, monkeypatch, capfd
):
    path, real = tmp_path / "run", replay.os.replace
    failing = fail
    if told == "arrivals-0.json":

        def failing(source, target):
            return fail() if str(target).endswith(told) else real(source, target)

    monkeypatch.setattr(*broken, failing)
    is_whole(train(path, log="csv,mllog"), path)
    assert capfd.readouterr().err.count(f"{told} cannot be written (KeyError") == 1


def test_a_torch_that_was_never_tried_is_told_once_and_ends_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    is_whole(train(tmp_path / "run"), tmp_path / "run")
    assert capfd.readouterr().err.count("torch 2.99.0 is newer than any that mpitrain was tried with") == 1


def test_a_trace_that_cannot_be_written_is_told_and_the_simulation_has_its_result(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr("mpitrain.system.trace.write_whole", fail)
    path = tmp_path / "run"
    job = toy.make_job(epochs=1, trace="steps=0:2")
    assert mt.simulate(job, mt.Async(), workers=2, run_dir=str(path), quiet=True)["status"] == "ok"
    assert "trace-rank-1.json cannot be written (KeyError" in capfd.readouterr().err


class Ascii(io.TextIOWrapper):
    def __init__(self):
        super().__init__(io.BytesIO(), encoding="ascii", errors="strict", write_through=True)

    @property
    def text(self):
        return self.buffer.getvalue().decode()


def test_a_run_is_reported_on_streams_that_lack_its_letters_are_closed_or_missing(tmp_path, monkeypatch):
    plain, closed = Ascii(), io.StringIO()
    closed.close()
    for number, stream in enumerate((plain, closed, None)):
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, stream)
        path = tmp_path / str(number)
        is_whole(train(path, name="Übung"), path)
    assert r"job=\xdcbung" in plain.text


def test_printing_never_raises_and_escapes_what_cannot_be_shown():
    class Broken:
        def write(self, text):
            raise BrokenPipeError(32, "nobody reads")

    write(Broken(), "text")
    stream = Ascii()
    write(stream, "é")
    escape_what_cannot_be_printed(stream, None, Broken())
    print("ü\udcff", file=stream, end="")
    assert stream.text == r"\xe9\xfc\udcff"
