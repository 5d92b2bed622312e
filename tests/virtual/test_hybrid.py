"""Dense parameters by an all-reduce beside rows of tables on servers: against `sync()`, which sends both to servers."""

import dataclasses
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.job import Overrides
from mpitrain.planning.dry_run import describe
from mpitrain.simulation.comparison import Comparison
from mpitrain.training.measure import same_model
from mpitrain.values import parse
from mpitrain.virtual import Constant
from tests import small_jobs, sparse_jobs, toy
from tests.virtual.test_served_tables import Chained, simulated, wide

SERVED = "hybrid(servers={},tables='servers')"


def against_sync(tmp_path, job, servers=2, workers=4, **options):
    """Whether both leave the same bits, and what the hybrid run returned."""
    simulated(tmp_path / "sync", job, f"sync(servers={servers})", workers, **options)
    result = simulated(tmp_path / "hybrid", job, SERVED.format(servers), workers, **options)
    return same_model(*(tmp_path / name / "model.safetensors" for name in ("sync", "hybrid"))), result


def two_rates(parameters):
    """One for the table, and one for the rest."""
    table, *rest = parameters
    return torch.optim.Adagrad([{"params": [table]}, {"params": rest, "lr": 0.25}], lr=2.0**-4)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": "adagrad", "epochs": 3},
        {"validate": toy.Memory(), "optimizer": "adagrad"},
        {"clip_value": 0.01},
        {"accumulate": 2, "batch_size": 2},
        {"schedule": mt.Cosine(epochs=4.0), "epochs": 3},
        {"scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5), "epochs": 3},
        {"layer": "bag", "words": "few"},
    ],
    ids=str,
)
def test_the_bits_are_those_of_servers_alone(tmp_path, servers, changes):
    job = sparse_jobs.make_job(loss=sparse_jobs.square_loss, **changes)
    same, _ = against_sync(tmp_path, job, servers)
    assert same
    bias = load_file(tmp_path / "hybrid" / "model.safetensors")["bias.weight"]
    assert not torch.equal(bias, torch.ones_like(bias))  # it was trained


def test_groups_of_the_optimizer_keep_their_options(tmp_path):
    job = dataclasses.replace(sparse_jobs.make_job(loss=sparse_jobs.square_loss), optimizer=two_rates)
    assert against_sync(tmp_path, job)[0]


def test_rows_that_only_servers_hold(tmp_path):
    job = sparse_jobs.make_job(
        model=sparse_jobs.Served, loss=sparse_jobs.square_loss, optimizer="adagrad", validate=toy.Memory()
    )
    same, result = against_sync(tmp_path, job)
    tables = [sparse_jobs.table_of(tmp_path / name, job) for name in ("sync", "hybrid")]
    assert same and torch.equal(*tables) and tables[0].abs().sum() > 0
    model = mt.load(tmp_path / "hybrid", job=job)
    with torch.no_grad():
        loss = sparse_jobs.square_loss(model, toy.Memory().reader(None, 0).batch(0, 0, 48), sparse_jobs.many)
    assert result["metrics"]["validation_loss"] == pytest.approx(float(loss), rel=1e-5)


def test_look_ups_that_depend_on_rows_take_the_same_steps(tmp_path):
    job = sparse_jobs.make_job(
        model=lambda: Chained(True), loss=sparse_jobs.square_loss, validate=toy.Memory()
    )
    against_sync(tmp_path, job)
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("hybrid", "sync"))
    for name in found.keys() - {"norm.running_mean", "norm.running_var"}:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-5)


def test_one_worker_is_serial_training(tmp_path):
    job = sparse_jobs.make_job(False, loss=sparse_jobs.square_loss, batch_size=5)  # the last one is smaller
    simulated(tmp_path / "alone", job, "allreduce()", 1)
    job = sparse_jobs.make_job(loss=sparse_jobs.square_loss, batch_size=5)
    simulated(tmp_path / "hybrid", job, SERVED.format(2), 1)
    assert same_model(*(tmp_path / name / "model.safetensors" for name in ("alone", "hybrid")))


@pytest.mark.parametrize(("workers", "batch_size"), [(5, 4), (7, 3), (3, 16)])
@pytest.mark.parametrize(
    "rates", [{}, {"scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)}]
)
def test_it_trains_what_an_allreduce_trains(tmp_path, workers, batch_size, rates):
    """Of the same batches, the last ones of an epoch smaller and unequal, or left out."""
    models = []
    for sparse, text in ((False, "allreduce()"), (True, SERVED.format(2))):
        job = sparse_jobs.make_job(
            sparse, loss=sparse_jobs.square_loss, batch_size=batch_size, epochs=3, **rates
        )
        result = simulated(tmp_path / str(sparse), job, text, workers)
        models.append((result["steps"], load_file(tmp_path / str(sparse) / "model.safetensors")))
    assert models[0][0] == models[1][0]
    for name, tensor in models[0][1].items():
        torch.testing.assert_close(models[1][1][name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("workers", "batch_size", "left_out"), [(5, 4, 0), (7, 3, 2 * 6), (3, 16, 0)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_all_workers_take_as_many_steps(tmp_path, workers, batch_size, left_out, drop_last):
    """48 samples twice; what is less than a sample for each is left out."""
    job = sparse_jobs.make_job(batch_size=batch_size, drop_last=drop_last, epochs=2)
    result = simulated(tmp_path, job, SERVED.format(2), workers)
    assert len({one["steps"] for one in result["per_worker"]}) == 1
    assert result["samples"] + result["samples_left_out"] == 96
    assert drop_last or result["samples_left_out"] == left_out
    assert simulated(tmp_path / "five", job, SERVED.format(1), workers, steps=5)["steps"] == 5


@pytest.mark.parametrize("servers", [1, 2])
def test_a_gradient_that_is_not_finite_counts_for_nothing_on_either_road(tmp_path, servers):
    """Gradients of a linear loss depend on no parameter, so the step is that of the mean of the other two."""
    job = sparse_jobs.make_job(batch_size=16, epochs=1, on_nonfinite="skip")
    inject = ("nan(worker=1,at_step=0)",)
    result = simulated(tmp_path / "nan", job, SERVED.format(servers), 3, inject=inject)
    assert (result["nonfinite"], result["steps"]) == (1, 1)
    found, model = load_file(tmp_path / "nan" / "model.safetensors"), sparse_jobs.make_job(False).model()
    batches = [toy.Memory().reader(None, job.seed).batch(0, start, 16) for start in (0, 32)]
    sum(sparse_jobs.linear_loss(model, one, sparse_jobs.many) for one in batches).backward()
    for name, parameter in model.named_parameters():
        expected = parameter.detach() - 2.0**-4 * parameter.grad / 2
        torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=1e-7)


def always_nan(model, batch, words):
    return sparse_jobs.linear_loss(model, batch, words) * torch.nan


def test_a_gradient_that_is_not_finite_ends_the_run_with_nothing_of_it_applied(tmp_path):
    job = sparse_jobs.make_job(loss=always_nan)
    result = mt.simulate(
        job, parse(SERVED.format(2), "strategy"), workers=3, run_dir=str(tmp_path), quiet=True
    )
    assert result["status"] == "fail" and "(worker, step 0): the gradient is not finite" in result["failure"]
    found, expected = load_file(tmp_path / "model.safetensors"), sparse_jobs.make_job(False).model()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.state_dict().items())


def test_a_worker_whose_gradients_are_never_finite_ends_the_run(tmp_path):
    job = sparse_jobs.make_job(loss=always_nan, epochs=4, on_nonfinite="skip")
    result = mt.simulate(
        job, parse(SERVED.format(1), "strategy"), workers=3, run_dir=str(tmp_path), quiet=True
    )
    assert result["status"] == "fail" and "10 gradients in a row that are not finite" in result["failure"]


def test_a_straggler_in_mid_ring_and_validations_hold_nothing_up(tmp_path):
    """Messages of a validation come while others are still in the ring, and chunks before the ring has begun."""
    job = sparse_jobs.make_job(
        loss=sparse_jobs.square_loss, validate=toy.Memory(), epochs=3, validate_every="12 samples"
    )
    options = {"inject": ("slow(worker=2,factor=4)",), "network": parse("link(latency_s=0.3)", "network")}
    same, result = against_sync(tmp_path, job, compute=Constant(1.0), **options)
    assert same and result["steps"] == 9


def test_an_early_end_finds_all_workers_at_the_same_step(tmp_path):
    job = sparse_jobs.make_job(loss=sparse_jobs.square_loss, validate=toy.Memory(), epochs=50, patience=1)
    job = dataclasses.replace(
        job, optimizer=partial(torch.optim.SGD, lr=2.0**-4, maximize=True)
    )  # worse and worse
    same, result = against_sync(tmp_path, job)
    assert same and result["ended_early"] and result["samples"] < 50 * 48


class TwoTables(nn.Module):
    """A table of which every batch touches all, and one of which it touches few."""

    def __init__(self):
        super().__init__()
        self.often = nn.Embedding(small_jobs.NUM_TOKENS, 8192, sparse=True)
        self.seldom = nn.Embedding(5 * 8192, 4, sparse=True)
        self.head = nn.Linear(4, sparse_jobs.WIDTH)

    def forward(self, words):
        found = self.often(words).mean(1)[:, :4] + self.seldom(words * 8191 % (5 * 8192)).mean(1)
        return self.head(found)


def test_each_table_takes_the_road_of_fewer_bytes(tmp_path):
    def loss(model, batch):
        return model(small_jobs.tokens(batch)).square().mean()

    job = dataclasses.replace(sparse_jobs.make_job(model=TwoTables, batch_size=12), loss=loss)
    results = {
        text: simulated(tmp_path / str(number), job, text)
        for number, text in enumerate(("hybrid()", "hybrid(tables='servers')"))
    }
    said = describe(dataclasses.replace(job, strategy=mt.Hybrid()), Overrides(), 5, 1)
    assert f"often is part of it: {small_jobs.NUM_TOKENS} rows of 8192, and the first batch touches" in said
    assert "tables      seldom" in said and "tables      often" not in said
    pushed = [result["pushed_bytes"] for result in results.values()]
    often = small_jobs.NUM_TOKENS * 8192 * 4
    assert pushed[0] < often / 8 < pushed[1]  # rows of the first table went with the dense parameters
    found, expected = (load_file(tmp_path / str(one) / "model.safetensors") for one in range(2))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7)


def test_where_every_table_is_dense_servers_would_have_nothing_to_do(tmp_path):
    with pytest.raises(UsageError, match=r'use allreduce\(\), or hybrid\(tables="servers"\)'):
        simulated(tmp_path, sparse_jobs.make_job(), "hybrid()")


class Tower(nn.Module):
    """A table beside 4 MB of dense parameters."""

    def __init__(self):
        super().__init__()
        self.table, self.tower = nn.Embedding(1 << 14, 16, sparse=True), nn.Linear(16, 1 << 16)

    def forward(self, words):
        return self.tower(self.table(words * 191).sum(1)).view(len(words), 4, -1).sum(2)


def test_dense_bytes_of_a_step_do_not_grow_with_the_workers(tmp_path):
    """Over links of 1 Gbit/s, where nothing else takes long: at a server they do."""
    job = sparse_jobs.make_job(model=Tower, batch_size=1, epochs=1, data=toy.Memory(64))
    network, took_s = parse("link(gbit_per_s=1)", "network"), {}
    for text in ("sync(servers=2)", "hybrid(servers=2)"):
        options = Overrides(run_dir=str(tmp_path / text[:4]), quiet=True, steps=2)
        runs = Comparison(job, options, Constant(1e-6, 0.0), network, timing_only=True)
        for workers in (2, 16):
            timed = runs.timed(parse(text, "strategy"), workers, tmp_path / "timed")
            took_s[text[:4], workers] = timed["virtual_s"] / timed["steps"]
    assert took_s["sync", 16] > 3 * took_s["sync", 2]
    assert took_s["hybr", 16] < 2.5 * took_s["hybr", 2] and took_s["hybr", 16] < took_s["sync", 16] / 4


@pytest.mark.extended
def test_timing_alone_takes_as_long(tmp_path):
    """On a slow link, where messages take nearly all of the time."""
    network, text = parse("link(gbit_per_s=0.001,latency_s=0.001)", "network"), "hybrid(servers=2)"
    job = wide(True)
    counted = simulated(tmp_path / "run", job, text, network=network, compute=Constant(1e-3, 0.0))
    options = Overrides(run_dir=str(tmp_path / "timed"), quiet=True)
    runs = Comparison(job, options, Constant(1e-3, 0.0), network, timing_only=True)
    timed = runs.timed(parse(text, "strategy"), 4, tmp_path / "timed")
    assert timed["steps"] == counted["steps"]
    assert timed["virtual_s"] == pytest.approx(counted["virtual_s"], rel=0.1)


def test_a_norm_of_the_whole_gradient_is_refused(tmp_path):
    with pytest.raises(UsageError, match="use clip_value, or sync"):
        simulated(tmp_path, sparse_jobs.make_job(clip_norm=0.1), SERVED.format(1))


@pytest.mark.parametrize(
    "text",
    ["hybrid(damping=inverse())", "hybrid(push_every=2)", "hybrid(inflight=2)", "hybrid(optimizer='worker')",
     "hybrid(push_wire=topk())", "hybrid(batching=per_round())", "hybrid(warmup=warmup(workers=1,epochs=1))",
     "hybrid(tables='workers')"],
)  # fmt: skip
def test_settings_for_workers_apart_are_refused(text):
    with pytest.raises(UsageError):
        parse(text, "strategy")
