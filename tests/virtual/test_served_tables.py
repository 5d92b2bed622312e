"""Tables on virtual servers: sparse gradients against dense ones, rows that servers alone hold, deaths, refusals."""

import dataclasses
import itertools
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.job import Overrides
from mpitrain.simulation.comparison import Comparison
from mpitrain.training.measure import same_model
from mpitrain.values import parse
from mpitrain.virtual import Constant
from tests import small_jobs, sparse_jobs, toy

SERVERS = (
    "sync(servers=2)",
    "async(servers=3)",
    "async(inflight=2)",
    "softsync()",
    "ssp(servers=2)",
    "backup(spare=1)",
)
ROUNDED = (
    "sync(push_wire='bfloat16')", "sync(reply_wire='float16')", "async(servers=2,damping=inverse())",
    "sync(servers=2,reply_wire='bfloat16',push_wire='float16')", "async(warmup=warmup(workers=1,epochs=1))",
)  # fmt: skip


def simulated(path, job, text, workers=4, **options):
    result = mt.simulate(
        job, parse(text, "strategy"), workers=workers, run_dir=str(path), quiet=True, **options
    )
    assert result["status"] == "ok", result["failure"]
    return result


def both(tmp_path, text, make=sparse_jobs.make_job, **options):
    """Whether a run with sparse gradients and one with dense ones leave the same bits."""
    for name, sparse in (("sparse", True), ("dense", False)):
        simulated(tmp_path / name, make(sparse), text, **options)
    return same_model(*(tmp_path / name / "model.safetensors" for name in ("sparse", "dense")))


@pytest.mark.parametrize("text", SERVERS + ROUNDED)
@pytest.mark.parametrize(("layer", "words", "optimizer"), sparse_jobs.KINDS[::3])
def test_sparse_gradients_train_the_bits_of_dense_ones(tmp_path, text, layer, words, optimizer):
    kind = {"layer": layer, "words": words, "optimizer": optimizer}
    assert both(tmp_path, text, lambda sparse: sparse_jobs.make_job(sparse, **kind))


@pytest.mark.parametrize(
    "changes", [{"clip_norm": 0.1}, {"clip_value": 0.01}, {"accumulate": 2, "batch_size": 2}]
)
@pytest.mark.parametrize("text", ["sync(servers=2)", "async()"])
def test_clipping_and_accumulation_see_the_rows(tmp_path, text, changes):
    changes = changes | {"loss": sparse_jobs.square_loss, "optimizer": "adagrad"}
    both(tmp_path, text, lambda sparse: sparse_jobs.make_job(sparse, **changes))
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("sparse", "dense"))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def test_with_a_worker_that_dies_the_bits_are_those_of_dense_gradients(tmp_path):
    assert both(tmp_path, "sync(servers=2)", inject=("kill(worker=1,at_step=1)",))


@pytest.mark.parametrize("text", ["async()", "async(servers=3)", "async(servers=2,inflight=2)"])
def test_after_deaths_every_gradient_has_been_applied_to_every_row_once(tmp_path, text):
    """The gradients of a linear loss depend on no parameter, and dyadic sums on no order: what a run leaves says which
    gradients were added."""
    simulated(tmp_path / "whole", sparse_jobs.make_job(), text)
    killed = ("kill(worker=1,at_step=1)", "kill(worker=2,at_step=3)", "kill_at_end(worker=0)")
    result = simulated(tmp_path / "killed", sparse_jobs.make_job(), text, inject=killed)
    assert len(result["lost"]) == 3
    assert same_model(*(tmp_path / name / "model.safetensors" for name in ("whole", "killed")))


@pytest.mark.parametrize("partition", ["hash", "range"])
@pytest.mark.parametrize("text", ["sync()", "sync(servers=3)"])
def test_rows_on_servers_alone_are_those_of_a_layer_that_all_hold(tmp_path, text, partition):
    served = sparse_jobs.make_job(model=lambda: sparse_jobs.Served(partition=partition), optimizer="adagrad")
    simulated(tmp_path / "served", served, text)
    held = sparse_jobs.make_job(model=lambda: sparse_jobs.FromZeros(True), optimizer="adagrad")
    simulated(tmp_path / "held", held, text)
    model = load_file(tmp_path / "held" / "model.safetensors")
    assert torch.equal(sparse_jobs.table_of(tmp_path / "served", served), model["table.weight"])
    assert not (sparse_jobs.table_of(tmp_path / "served", served) == 0).all()
    assert load_file(tmp_path / "served" / "model.safetensors")["table.weight"].shape == (
        0,
        sparse_jobs.WIDTH,
    )


@pytest.mark.parametrize("optimizer", [sparse_jobs.sgd, mt.RowwiseAdagrad])
def test_any_number_of_servers_trains_the_same_rows(tmp_path, optimizer):
    def model():
        made = sparse_jobs.Served(mode="sum")
        made.table.init, made.table.scale = "normal", 0.5
        return made

    job = sparse_jobs.make_job(model=model, optimizer="sgd", loss=sparse_jobs.square_loss)
    job = dataclasses.replace(job, optimizer=optimizer)
    tables = []
    for servers in (1, 2, 5):
        simulated(tmp_path / str(servers), job, f"sync(servers={servers})")
        tables.append(sparse_jobs.table_of(tmp_path / str(servers), job))
    assert torch.equal(tables[0], tables[1]) and torch.equal(tables[0], tables[2])
    assert tables[0].std() > 0.1


def test_a_validation_looks_up_the_rows_of_its_own_batches(tmp_path):
    """Its loss after the last update is that of the model that is left."""
    job = sparse_jobs.make_job(loss=sparse_jobs.square_loss, validate=toy.Memory())
    result = simulated(tmp_path, job, "sync(servers=2)")
    model = sparse_jobs.make_job(False).model()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    with torch.no_grad():
        batch = toy.Memory().reader(None, 0).batch(0, 0, 48)
        loss = sparse_jobs.square_loss(model, batch, sparse_jobs.many)
    assert result["metrics"]["validation_loss"] == pytest.approx(float(loss), rel=1e-5)


class Chained(nn.Module):
    """What is looked up second depends on the rows that were found first; the third look-up is of some batches only."""

    def __init__(self, sparse):
        super().__init__()
        self.first, self.second = (sparse_jobs.Summed(nn.Embedding, sparse) for _ in range(2))
        self.norm = nn.BatchNorm1d(sparse_jobs.WIDTH)

    def forward(self, words):
        found = self.norm(self.first(words))
        again = (found.detach().abs().sum(1, keepdim=True) * 16).long() % sparse_jobs.ROWS
        found = found + self.second(again)
        if int(words.sum()) % 2:
            found = found + self.first(again + 1 - 2 * (again > 1).long())
        return found


@pytest.mark.parametrize("text", ["sync(servers=2)", "backup(spare=0)"])
def test_look_ups_that_depend_on_rows_and_on_batches_are_found_out(tmp_path, text):
    changes = {"loss": sparse_jobs.square_loss, "optimizer": "adagrad", "validate": toy.Memory()}
    both(tmp_path, text, lambda sparse: sparse_jobs.make_job(model=lambda: Chained(sparse), **changes))
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("sparse", "dense"))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)


def test_look_ups_that_differ_from_pass_to_pass_are_refused(tmp_path):
    passes = itertools.count()

    def words(batch):
        return sparse_jobs.many(batch) * 0 + next(passes) % sparse_jobs.ROWS

    job = sparse_jobs.make_job()
    job = dataclasses.replace(job, loss=partial(sparse_jobs.linear_loss, words=words))
    with pytest.raises(UsageError, match="worker 0, step [0-9]: 16 forward passes over one batch"):
        simulated(tmp_path, job, "async()", workers=1)


class Careful(sparse_jobs.Summed):
    """Whose look-ups stand in a `try` of its own; the second depends on the rows of the first."""

    def forward(self, words):
        try:
            first = super().forward(words)
            is_positive = (first.detach().sum(1, keepdim=True) > 0).long()
            return first + super().forward((words + 1 + is_positive) % sparse_jobs.ROWS)
        except Exception:
            return self.bias(torch.ones(len(words), 1))


def test_a_model_that_handles_exceptions_itself_is_trained_with_its_rows(tmp_path):
    assert both(
        tmp_path, "sync()", lambda sparse: sparse_jobs.make_job(model=lambda: Careful(nn.Embedding, sparse))
    )


def test_a_module_that_a_job_has_brought_is_as_before_the_run(tmp_path):
    """Its layer looks up its own weight, which is that of the final model."""
    module = sparse_jobs.Summed(nn.Embedding, True)
    simulated(tmp_path, sparse_jobs.make_job(model=module), "sync(servers=2)")
    words, trained = torch.arange(10).view(2, 5), load_file(tmp_path / "model.safetensors")
    other = sparse_jobs.Summed(nn.Embedding, True)
    other.load_state_dict(trained)
    assert torch.equal(module(words), other(words))
    assert not torch.equal(other.table.weight, sparse_jobs.Summed(nn.Embedding, True).table.weight)


class TablesAlone(nn.Module):
    """Nothing but two tables: users and items."""

    def __init__(self, sparse):
        super().__init__()
        self.users, self.items = nn.Embedding(85, 4, sparse=sparse), nn.Embedding(85, 4, sparse=sparse)
        for table in (self.users, self.items):
            with torch.no_grad():
                table.weight.copy_(torch.arange(340).reshape(85, 4) % 8 / 8)

    def forward(self, words):
        return (self.users(words[:, 0]) * self.items(words[:, 1])).sum(1, keepdim=True)


@pytest.mark.parametrize("text", ["sync(servers=3)", "async()"])
def test_a_model_of_nothing_but_tables_trains(tmp_path, text):
    assert both(tmp_path, text, lambda sparse: sparse_jobs.make_job(model=lambda: TablesAlone(sparse)))


@pytest.mark.parametrize(
    ("bad", "where"), [(-3, "id -3, sample 2, field 1"), (85, "id 85, sample 2, field 1")]
)
def test_an_id_that_is_no_row_is_refused_by_batch_and_field(tmp_path, bad, where):
    def words(batch):
        found = sparse_jobs.many(batch)
        found[2, 1] = bad
        return found

    job = sparse_jobs.make_job()
    job = dataclasses.replace(job, loss=partial(sparse_jobs.linear_loss, words=words))
    with pytest.raises(UsageError, match=f"table 'table' has rows 0 to 84, and the batch asks for {where}"):
        simulated(tmp_path, job, "async()")


def served_job(**changes):
    return sparse_jobs.make_job(model=sparse_jobs.Served, **changes)


@pytest.mark.parametrize("text", ["allreduce()", "localsgd()", "decentralized()", "elastic()", "sharded()"])
def test_rows_on_servers_need_servers(tmp_path, text):
    with pytest.raises(
        UsageError, match=r"layer 'table' is a ServedEmbedding: .*; nn.Embedding holds its rows"
    ):
        simulated(tmp_path, served_job(), text)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ema": 0.5}, "ema=0.5 keeps a copy of the whole model"),
        (
            {"keep_best": "validation_loss", "validate": toy.Memory()},
            "keep_best=.validation_loss. keeps a copy",
        ),
        ({"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}, "momentum=0.9"),
        ({"optimizer": torch.optim.Adam}, "Adam takes no sparse gradients"),
        ({"optimizer": lambda p: torch.optim.Adagrad(p, weight_decay=0.1)}, "weight_decay=0.1"),
    ],
)
@pytest.mark.parametrize("make", [served_job, sparse_jobs.make_job])
def test_what_rows_cannot_follow_is_refused_with_the_reason(tmp_path, make, changes, said):
    changes = dict(changes)
    optimizer = changes.pop("optimizer", None)
    job = make(**changes)
    job = dataclasses.replace(job, optimizer=optimizer) if optimizer else job
    with pytest.raises(UsageError, match=said):
        simulated(tmp_path, job, "async()")


def test_without_servers_the_layer_says_where_its_rows_are():
    with pytest.raises(UsageError, match=r"no rows: they live on parameter servers .*mpitrain.load"):
        sparse_jobs.Served()(small_jobs.tokens({"x": torch.zeros(2, 5)}))


@pytest.mark.parametrize(
    "arguments", [(0, 4), (5, 0), (5, 4, "max"), (5, 4, None, "ones"), (5, 4, None, "normal", 1.0, "mod")]
)
def test_a_layer_that_cannot_be_is_refused(arguments):
    with pytest.raises(UsageError, match="ServedEmbedding: "):
        mt.ServedEmbedding(*arguments)


@pytest.mark.parametrize("text", ["async()", "elastic()", "allreduce()"])
def test_layers_are_trained_with_whole_gradients_where_the_job_says_so(tmp_path, text):
    found = simulated(tmp_path / "sparse", sparse_jobs.make_job(sparse_as_dense=True), text)
    dense = simulated(tmp_path / "dense", sparse_jobs.make_job(False), text)
    assert same_model(*(tmp_path / name / "model.safetensors" for name in ("sparse", "dense")))
    assert found.get("pushed_bytes") == dense.get("pushed_bytes")


class Wide(nn.Module):
    """A table of 4 MiB."""

    def __init__(self, sparse):
        super().__init__()
        self.table, self.head = nn.Embedding(1 << 16, 16, sparse=sparse), nn.Linear(16, 4)

    def forward(self, words):
        return self.head(self.table(words * 769).sum(1))


def wide(sparse, **changes):
    return sparse_jobs.make_job(
        model=lambda: Wide(sparse),
        loss=sparse_jobs.square_loss,
        optimizer="adagrad",
        data=toy.Memory(2048),
        **changes,
    )


@pytest.mark.extended
def test_sixteen_workers_scale_with_touched_rows_and_not_with_whole_gradients(tmp_path):
    """Batches of 20 ms over links of 10 Gbit/s: what a server sends and takes in of whole tables is what limits."""
    found = {}
    for sparse in (True, False):
        rates = [
            simulated(
                tmp_path / f"{sparse}-{workers}", wide(sparse, epochs=1), "async(servers=2)", workers,
                compute=parse("gamma(mean=0.02)", "compute"), network=parse("gbe10()", "network"),
            )["samples_per_second"]
            for workers in (1, 16)
        ]  # fmt: skip
        found[sparse] = rates[1] / rates[0] / 16
    assert found[True] > 0.9 > found[False]


def test_timing_alone_charges_the_rows_that_batches_touch(tmp_path):
    """They are drawn from a short run with gradients: bytes are within a fifth of what a whole run counts."""
    network = parse("gbe10()", "network")
    counted = simulated(tmp_path / "run", wide(True), "async(servers=2)", network=network)
    runs = Comparison(
        wide(True), Overrides(run_dir=str(tmp_path / "timed"), quiet=True), Constant(), network, timing_only=True
    )  # fmt: skip
    timed = runs.timed(parse("async(servers=2)", "strategy"), 4, tmp_path / "timed")
    for one, other in zip(timed["shards"], counted["shards"], strict=True):
        assert one["pushed_bytes"] == pytest.approx(other["pushed_bytes"], rel=0.2)
        assert one["replied_bytes"] == pytest.approx(other["replied_bytes"], rel=0.2)
