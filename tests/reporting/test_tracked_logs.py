"""`log="mlflow"` and `log="wandb"`: by stand-ins for the libraries what they are asked for, and by the libraries
themselves, where they are installed, what they have written."""

import importlib.util
import io
import os
import socket
import sys
import types

import pytest

import mpitrain as mt
from mpitrain.reporting.report import Report, Reported
from mpitrain.reporting.rows import earlier_rows
from tests import toy
from tests.reporting.logs import rows_of


def report(path, log, **options):
    stream = io.StringIO()
    one = Report(Reported(path, 100, stream=stream, logs=[log], log_every=1, **options))
    one.text = stream.getvalue
    return one


def begin(one):
    one.event("start", job="digits", strategy="async()", workers=4, batch_size=32)


def steps(one, first, last, factor=1.0):
    for step in range(first, last + 1):
        one.progress(10 * step, step, 1, factor * step)


class Client:
    """As `mlflow.tracking.MlflowClient`."""

    def __init__(self, tracking_uri):
        self.uri, self.calls = tracking_uri, Client.calls
        Client.calls.append(("client", tracking_uri))

    def get_experiment_by_name(self, name):
        return None if Client.is_new else types.SimpleNamespace(experiment_id="7")

    def create_experiment(self, name):
        self.calls.append(("create_experiment", name))
        return "7"

    def search_runs(self, experiments, run_view_type):
        old = types.SimpleNamespace(info=types.SimpleNamespace(run_id="old"))
        return [] if Client.is_new else [old]

    def create_run(self, experiment, run_name):
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))

    def log_batch(self, run, metrics):
        self.calls += [(metric.key, metric.value, metric.step) for metric in metrics]

    def log_param(self, run, name, value):
        self.calls.append(("param", name, value))

    def set_tag(self, run, name, value):
        self.calls.append(("tag", name, value))

    def delete_run(self, run):
        self.calls.append(("delete", run))

    def set_terminated(self, run, status):
        self.calls.append(("terminated", status))


class Metric:
    def __init__(self, key, value, timestamp, step):
        self.key, self.value, self.step = key, value, step


@pytest.fixture
def mlflow(monkeypatch):
    Client.calls, Client.is_new = [], True
    modules = {
        "mlflow": {},
        "mlflow.entities": {"Metric": Metric, "ViewType": types.SimpleNamespace(ACTIVE_ONLY=1)},
        "mlflow.tracking": {"MlflowClient": Client},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere.example")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "")
    return Client


class Run:
    """As what `wandb.init` returns."""

    def __init__(self, options):
        self.options, self.points, self.exit_code = options, [], None
        self.config, self.summary = {}, {}

    def define_metric(self, name, step_metric):
        self.by = step_metric

    def log(self, point):
        self.points.append(point)

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def wandb(monkeypatch):
    runs = []

    def init(**options):
        runs.append(Run(options))
        return runs[-1]

    class Settings:
        model_fields = {"console": None, "silent": None}

        def __init__(self, **given):
            assert set(given) <= set(self.model_fields)

    module = types.ModuleType("wandb")
    module.init, module.Settings = init, Settings
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")
    return runs


def test_mlflow_gets_every_row_in_a_store_of_files(tmp_path, mlflow):
    one = report(tmp_path, "mlflow")
    begin(one)
    steps(one, 1, 2)
    one.event("validation", epoch=1, samples=20, accuracy=0.5)
    one.event("end", status="ok", samples=20, accuracy=0.75, model="m")
    one.close()
    one.close()
    assert mlflow.calls[0] == ("client", (tmp_path / "mlflow").as_uri())
    assert ("param", "strategy", "async()") in mlflow.calls and ("tag", "model", "m") in mlflow.calls
    found = [call for call in mlflow.calls if call[0] in ("train/loss", "validation/accuracy")]
    assert found == [
        ("train/loss", 1.0, 10), ("train/loss", 2.0, 20), ("validation/accuracy", 0.5, 20),
        ("validation/accuracy", 0.75, 20),
    ]  # fmt: skip
    assert mlflow.calls[-1] == ("terminated", "FINISHED")
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


@pytest.mark.parametrize(
    ("status", "ended"),
    [("fail", "FAILED"), ("missed", "FAILED"), ("requeue", "SCHEDULED"), (None, "FAILED")],
)
def test_mlflow_hears_how_a_run_ends(tmp_path, mlflow, status, ended):
    one = report(tmp_path, "mlflow")
    steps(one, 1, 1)
    if status:
        one.event("end", status=status, samples=10, failure="why", model=None)
    one.close()
    assert mlflow.calls[-1] == ("terminated", ended)
    assert (("tag", "failure", "why") in mlflow.calls) == bool(status)


def test_mlflow_has_one_run_and_no_step_twice_where_a_run_goes_on(tmp_path, mlflow):
    one = report(tmp_path, "mlflow")
    begin(one)
    steps(one, 1, 5)
    one.close()
    mlflow.calls.clear()
    mlflow.is_new = False
    one = report(tmp_path, "mlflow", resumed_at=30)
    begin(one)
    steps(one, 4, 5, factor=2.0)
    one.close()
    losses = [(call[2], call[1]) for call in mlflow.calls if call[0] == "train/loss"]
    assert losses == [(10, 1.0), (20, 2.0), (30, 3.0), (40, 8.0), (50, 10.0)]
    assert ("delete", "old") in mlflow.calls


def test_wandb_gets_every_row_offline(tmp_path, wandb):
    one = report(tmp_path, "wandb")
    begin(one)
    steps(one, 1, 2)
    one.event("end", status="ok", samples=20, accuracy=0.75, model="m")
    one.close()
    (run,) = wandb
    assert run.options["mode"] == "offline" and run.options["dir"] == str(tmp_path)
    assert run.config["strategy"] == "async()" and run.by == "samples" and run.exit_code == 0
    assert [(point["samples"], point["train/loss"]) for point in run.points[:2]] == [(10, 1.0), (20, 2.0)]
    assert run.points[2] == {"samples": 20, "validation/accuracy": 0.75}
    assert run.summary == {"status": "ok", "model": "m"}
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"


def test_wandb_goes_on_under_the_same_id_with_the_rows_so_far(tmp_path, wandb):
    for resumed_at, first, last in ((0, 1, 5), (30, 4, 6), (None, 7, 7), (0, 1, 1)):
        one = report(tmp_path, "wandb", resumed_at=resumed_at)
        steps(one, first, last)
        one.close()
    names = [run.options["id"] for run in wandb]
    assert names[0] == names[1] == names[2] != names[3]
    assert [point["samples"] for point in wandb[1].points] == [10, 20, 30, 40, 50, 60]
    assert len(wandb[3].points) == 1 and wandb[0].exit_code == 1


@pytest.mark.parametrize("where", ["row", "close", "init"])
def test_a_library_that_fails_costs_its_rows_and_one_warning(tmp_path, wandb, monkeypatch, where):
    def fail(*arguments, **options):
        raise RuntimeError("the service has died\nTraceback")

    if where == "init":
        monkeypatch.setattr(sys.modules["wandb"], "init", fail)
    else:
        monkeypatch.setattr(Run, "log" if where == "row" else "finish", fail)
    one = report(tmp_path, "wandb")
    begin(one)
    steps(one, 1, 3)
    one.close()
    warnings = one.text().count("the service has died")
    assert warnings == 1 and len(rows_of(tmp_path)) == 4


def test_rows_of_earlier_starts_end_where_the_next_one_went_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        '{"event": "start"}', '{"event": "progress", "samples": 10}', '{"event": "progress", "samples": 20}',
        '{"event": "start"}', '{"event": "resume", "samples": 10}', '{"event": "progress", "samples": 15}',
        '{"event": "progress", "samples": 25}', '{"event": "prog',
    ]  # fmt: skip
    path.write_text("\n".join(lines))

    def samples(resumed_at):
        return [row["samples"] for row in earlier_rows(path, resumed_at) if row["event"] == "progress"]

    assert samples(None) == [10, 15, 25] and samples(20) == [10, 15]
    assert earlier_rows(tmp_path / "none", 5) == []


# ---- the libraries themselves


def needs(name):
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


@pytest.fixture
def no_network(monkeypatch):
    """This process may not connect to other machines, nor look for their names."""
    connect = socket.socket.connect

    def connect_nearby(self, address):
        assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost"), address
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_nearby)
    monkeypatch.setattr(socket, "getaddrinfo", None)


def simulate(path, log):
    job = toy.make_job(log=log, log_every=1, validate=toy.Memory())
    result = mt.simulate(job, mt.Async(), workers=2, quiet=True, run_dir=str(path))
    assert result["status"] == "ok"
    return [row for row in rows_of(path) if row["event"] == "progress"]


@needs("mlflow")
def test_mlflow_reads_back_what_was_logged(tmp_path, no_network, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    written = simulate(tmp_path, "mlflow")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    (experiment,) = [one for one in client.search_experiments() if one.name == tmp_path.name]
    (run,) = client.search_runs([experiment.experiment_id])
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((one.step, one.value) for one in losses) == [
        (row["samples"], row["loss"]) for row in written
    ]
    assert run.info.status == "FINISHED" and "validation/validation_loss" in run.data.metrics

    one = report(tmp_path, "mlflow", resumed_at=30)
    one.progress(36, 6, 1, 0.25)
    one.close()
    (run,) = client.search_runs([experiment.experiment_id])
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert [one.step for one in losses] == [6, 12, 18, 24, 30, 36]


@needs("wandb")
def test_wandb_writes_an_offline_run(tmp_path, no_network):
    written = simulate(tmp_path, "wandb")
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert b"train/loss" in content and len(written) > 3
    id_ = (tmp_path / "wandb" / "mpitrain-run-id").read_text()
    assert id_ in file.name
