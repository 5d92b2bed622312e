"""Validations that all workers compute, in virtual time: the figures are those of one process, to the bit."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.effects import Break, Compute, Sleep, replaced
from mpitrain.errors import UsageError
from mpitrain.roles.divided_validation import DividedValidation
from mpitrain.training.validations.measured_elsewhere import MeasuredByPeers, MeasuredByWorkers
from mpitrain.training.validations.validation import Measure
from mpitrain.values import parse
from tests import toy
from tests.sampling import cells

SERVED = [
    "sync()", "sync(servers=2)", "backup(spare=1)", "async()", "async(servers=2, inflight=2)", "softsync(updates=2)",
    "ssp(bound=2)", "bounded(staleness=2)", "elastic(push_every=2)", 'sync(optimizer="worker")', "async(push_every=2)",
]  # fmt: skip
FAMILIES = [
    *SERVED,
    "localsgd(period=2)",
    "localsgd(start=100)",
    "decentralized()",
    'decentralized(topology="ring")',
]
EACH = cells(FAMILIES, lambda text: text.split("(")[0] if text in FAMILIES[::2] else "others")
SET = toy.Memory(2100)  # nine batches


def scaled(model, batch):
    """A loss with weights, and so sums that depend on which samples are in it."""
    weight = batch["x"][:, :1].abs()
    return (weight * (model(batch["x"]) - batch["y"]) ** 2).sum(), float(weight.sum())


def make_job(**changes):
    fields = {"model": toy.normed, "loss": scaled, "validate": SET, "data": toy.Memory(72), "epochs": 2}
    return toy.make_job(**fields | {"metrics": shares} | changes)


def shares(model, batch):
    return {"share": (model(batch["x"]) > 0).float().mean()}


def run(path, job, strategy, workers):
    result = mt.simulate(job, parse(strategy, "strategy"), workers=workers, run_dir=str(path), quiet=True)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return result, [row for row in rows if row["event"] == "validation"]


def measured(job, tensors):
    """By one process."""
    module = job.model()
    module.load_state_dict(tensors)
    return Measure(job, module, SET.scan(), torch.device("cpu"))()


def of(names, row):
    return {name: row[name] for name in names}


@pytest.fixture
def units(monkeypatch):
    """(who, unit) of what is measured."""
    seen = []

    def watch(cls, name, who):
        original = getattr(cls, name)

        def noted(self, *arguments):
            seen.append((who(self), arguments[0]))
            return original(self, *arguments)

        monkeypatch.setattr(cls, name, noted)

    watch(MeasuredByWorkers, "unit", lambda one: one.replica.own_gradients.worker)
    watch(MeasuredByPeers, "share", lambda one: one.replica.rank)
    watch(Measure, "share", lambda one: id(one.module))
    return seen


def test_workers_that_are_together_measure_what_they_hold_not_the_mean_before(tmp_path):
    def job(epochs):
        return make_job(
            model=toy.perceptron, epochs=epochs
        )  # no buffers, so nothing is exchanged when all are equal

    last, _ = run(tmp_path / "a", job(2), "localsgd(period=8)", 3)  # four steps an epoch
    _, (_, row, _) = run(tmp_path / "b", job(4), "localsgd(period=8)", 3)
    assert of(last["metrics"], row) == last["metrics"]


@pytest.mark.parametrize(
    ("strategy", "workers"),
    cells(
        itertools.product(FAMILIES, (3, 1, 2, 4)),
        lambda cell: (cell[0], cell[1] if cell[0] in ("sync()", "localsgd(period=2)") else 0),
    ),
)
def test_the_figures_are_those_of_one_process_for_the_parameters_that_were_measured(
    strategy, workers, units, tmp_path
):
    if workers < 2 and strategy.startswith("backup"):
        pytest.skip("needs two workers")
    job = make_job(
        keep_best=">validation_loss", validate_every="never" if workers == 4 and strategy in SERVED else None
    )
    result, rows = run(tmp_path / "a", job, strategy, workers)
    final = measured(job, load_file(tmp_path / "a" / "model.safetensors"))
    assert final == result["metrics"]
    best = measured(job, load_file(tmp_path / "a" / "model-best.safetensors"))
    assert best["validation_loss"] == result["best"]["value"] == max(
        row["validation_loss"] for row in [*rows, result]
    )  # fmt: skip
    assert len({who for who, _ in units}) == workers


@pytest.mark.parametrize(
    "strategy", ["sync()", "async(servers=2)", "elastic(push_every=2)", "softsync(updates=2)"]
)
@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_a_worker_that_dies_or_stalls_in_a_validation_costs_no_figure(strategy, how, monkeypatch, tmp_path):
    job = make_job(keep_best=">validation_loss")
    fails = iter([True])
    assist = DividedValidation.assist

    def failing(self):
        def answer_to(effect):
            if isinstance(effect, Compute) and next(fails, False):
                yield Break("kill") if how == "dies" else Sleep(1e4, interruptible=False)
            return (yield effect)

        return replaced(assist(self), answer_to)

    monkeypatch.setattr(DividedValidation, "assist", failing)
    result, rows = run(tmp_path / "a", job, strategy, 3)
    assert next(fails, None) is None and result["status"] == "ok"
    assert len(result["lost"]) == (how == "dies") and result["samples"] == 2 * 72
    assert measured(job, load_file(tmp_path / "a" / "model.safetensors")) == result["metrics"]
    best = measured(job, load_file(tmp_path / "a" / "model-best.safetensors"))
    assert best["validation_loss"] == result["best"]["value"]


@pytest.mark.parametrize("strategy", ["sync(servers=2)", "async()"])
def test_a_validating_worker_that_dies_is_followed_by_another(strategy, monkeypatch, tmp_path):
    fails, compute = iter([True]), DividedValidation._compute

    def failing(self, unit):
        if unit >= 2 and next(fails, False):
            yield Break("kill")
        yield from compute(self, unit)

    monkeypatch.setattr(DividedValidation, "_compute", failing)
    job = make_job(epochs=3)
    result, rows = run(tmp_path / "a", job, strategy, 3)
    assert result["status"] == "ok" and list(result["lost"].values()) == ["died"] and rows
    assert measured(job, load_file(tmp_path / "a" / "model.safetensors")) == result["metrics"]


@pytest.mark.parametrize("strategy", EACH)
def test_the_moving_average_is_measured_on_request(strategy, tmp_path):
    workers = 3
    job = make_job(ema=0.5, validate_ema=True, keep_best="ema_validation_loss", patience=9)
    result, rows = run(tmp_path / "a", job, strategy, workers)
    assert {"validation_loss", "share", "ema_validation_loss", "ema_share"} <= rows[0].keys()
    average = measured(job, load_file(tmp_path / "a" / "model-ema.safetensors"))
    assert {f"ema_{name}": value for name, value in average.items()}.items() <= result["metrics"].items()
    assert result["metrics"]["ema_validation_loss"] != result["metrics"]["validation_loss"]
    best = measured(job, load_file(tmp_path / "a" / "model-best.safetensors"))
    assert best["validation_loss"] == result["best"]["value"]
    plain = make_job(ema=0.5)
    assert run(tmp_path / "b", plain, strategy, workers)[0]["metrics"].keys() == average.keys()
    for name, tensor in load_file(tmp_path / "b" / "model.safetensors").items():
        assert torch.equal(tensor, load_file(tmp_path / "a" / "model.safetensors")[name])


def test_measuring_an_average_takes_one_and_data():
    for fields in ({}, {"ema": 0.5, "validate": None, "metrics": None}):
        with pytest.raises(UsageError, match="validate_ema=True measures"):
            make_job(**fields, validate_ema=True)


def test_targets_may_be_of_the_average(tmp_path):
    job = make_job(ema=0.5, validate_ema=True, metrics=None, target={"ema_validation_loss": "<-1"})
    result, _ = run(tmp_path / "a", job, "sync()", 2)
    assert result["exit_code"] == 3 and result["target_missed"] == {"ema_validation_loss": "<-1"}


class Ordered:
    """A function of the whole set that notes what it was given."""

    def __init__(self):
        self.calls = []

    def __call__(self, predictions, targets):
        self.calls.append((predictions.clone(), targets.clone()))
        return {"middle": predictions.median(), "apart": (predictions - targets).abs().max().item()}


@pytest.mark.parametrize("strategy", EACH)
def test_collected_is_called_once_with_the_whole_set_in_order(strategy, tmp_path):
    found = []
    for workers in (2, 3):
        ordered = Ordered()
        job = make_job(metrics=[shares, mt.Collected(ordered)], keep_best="<apart", target={"middle": "<1e9"})
        result, rows = run(tmp_path / str(workers), job, strategy, workers)
        assert (
            len(ordered.calls) == len(rows) + 1
            and result["metrics_reduction"] == "mean over batches and whole set"
        )
        predictions, targets = ordered.calls[-1]
        assert torch.equal(targets, toy.MemoryReader(SET).y)
        module = job.model()
        module.load_state_dict(load_file(tmp_path / str(workers) / "model.safetensors"))
        x = toy.MemoryReader(SET).x
        with torch.no_grad():
            assert torch.equal(predictions, torch.cat([module.eval()(part) for part in x.split(256)]))
        assert result["metrics"]["middle"] == predictions.median().item()
        found.append(result["best"]["metric"])
    assert found == ["apart", "apart"]


def test_what_is_collected_may_be_said(tmp_path):
    def outputs(model, batch):
        return {"sum": batch["x"].sum(1), "y": batch["y"]}

    def function(whole):
        assert set(whole) == {"sum", "y"} and len(whole["y"]) == 2100
        return {"same": float((whole["sum"] == whole["y"][:, 0]).all())}

    job = make_job(metrics=mt.Collected(function, outputs=outputs))
    assert run(tmp_path / "a", job, "sync()", 3)[0]["metrics"]["same"] == 1.0


@pytest.mark.parametrize(
    "metrics, text",
    [
        (mt.Collected(lambda p, t: 3.0), "must return a dict"),
        (mt.Collected(lambda p, t: {"a": torch.ones(2)}), "'a' must be one number"),
        (
            mt.Collected(lambda p: {"a": 1.0}, outputs=lambda m, b: torch.ones(1)),
            "a row for each of the batch's",
        ),
        ([shares, shares], "two of the metrics are called 'share'"),
        ([shares, mt.Collected(lambda p, t: {"share": 1.0})], "two of the metrics are called 'share'"),
    ],
)
def test_what_cannot_be_put_together_is_refused_in_words(metrics, text, tmp_path):
    with pytest.raises(UsageError, match=text):
        run(tmp_path / "a", make_job(metrics=metrics), "sync()", 2)


def test_what_declares_no_metrics_is_refused():
    for metrics in ([3], {"a": 3}, "accuracy"):
        with pytest.raises(UsageError, match="metrics"):
            make_job(metrics=metrics)
    with pytest.raises(UsageError, match="Collected: function must be"):
        mt.Collected(3)


@pytest.mark.parametrize("strategy", ["sync()", "async(servers=2)", "localsgd(period=2)", "decentralized()"])
def test_torchmetrics_are_taken_as_they_are_and_equal_their_own_update(strategy, tmp_path):
    tm = pytest.importorskip("torchmetrics")

    def made():
        return {
            "mse": tm.MeanSquaredError(),
            "spearman": tm.SpearmanCorrCoef(),
            "pearson": tm.PearsonCorrCoef(),
            "mean": tm.MeanAbsoluteError(),
        }

    collection = tm.MetricCollection({"r2": tm.R2Score(), "max": tm.MinkowskiDistance(3)}, prefix="of_")
    job = make_job(
        metrics=[made(), collection, tm.ExplainedVariance()], keep_best="pearson", model=lambda: flat()
    )
    result, _ = run(tmp_path / "a", job, strategy, 3)
    module = job.model()
    module.load_state_dict(load_file(tmp_path / "a" / "model.safetensors"))
    x, y = vars(toy.MemoryReader(SET))["x"], vars(toy.MemoryReader(SET))["y"]
    serial = made() | {f"of_{name}": one for name, one in collection.items()} | {
        "ExplainedVariance": tm.ExplainedVariance()
    }  # fmt: skip
    for name, metric in serial.items():
        name = name.removeprefix("of_of_")
        metric.reset()
        with torch.no_grad():
            for part, right in zip(x.split(256), y.split(256)):
                metric.update(module.eval()(part), right)
        name = name if name in result["metrics"] else f"of_{name}"
        assert result["metrics"][name] == metric.compute().item(), name


def flat():
    return torch.nn.Sequential(torch.nn.Linear(5, 1), torch.nn.Tanh())
