"""Which layers, strategies and optimizers take gradients of touched rows, and what the others are told."""

import pytest
import torch
from torch import nn

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.model.gradient.clipping import Clipping
from mpitrain.model.gradient.sparse_gradients import (
    check_sparse_layers,
    check_sparse_optimizer,
    explained_tables,
    numbers_of_gradients,
    sparse_layers,
)
from mpitrain.strategies.features import MPI, why_not
from mpitrain.values import parse
from tests import sparse_jobs

TABLES = [nn.Embedding(4, 2, sparse=True), nn.EmbeddingBag(4, 2, sparse=True)]


@pytest.mark.parametrize("table", TABLES)
def test_layers_are_found_by_name_and_frozen_or_dense_ones_are_none(table):
    model = nn.ModuleDict({"inner": nn.Sequential(nn.Linear(2, 2), table), "dense": nn.Embedding(4, 2)})
    assert sparse_layers(model) == {"inner.1": table}
    frozen = nn.Embedding.from_pretrained(torch.ones(4, 2), sparse=True)
    assert sparse_layers(nn.Sequential(frozen)) == {}


@pytest.mark.parametrize(
    "text",
    [
        "elastic()",
        "sync(optimizer='worker')",
        "async(push_every=2)",
        "async(damping=gap_aware())",
        "localsgd()",
        "decentralized()",
        "sharded()",
        "allreduce(codec=onebit())",
    ],
)
def test_a_strategy_that_sends_whole_gradients_refuses_the_layer_by_name(text):
    why = why_not("sparse", parse(text, "strategy"), MPI)
    model = nn.ModuleDict({"inner": nn.Sequential(nn.Linear(2, 2), TABLES[1])})
    with pytest.raises(
        UsageError, match=r"'inner.1' is EmbeddingBag\(sparse=True\): .*leave sparse=True out"
    ):
        check_sparse_layers(model, why)
    check_sparse_layers(nn.Linear(2, 2), why)
    check_sparse_layers(model, why_not("sparse", mt.AllReduce(), MPI))


REFUSED = {
    "momentum": (lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9), r"SGD\(momentum=0.9\) moves rows"),
    "decay": (lambda own: torch.optim.SGD(own, lr=0.1, weight_decay=0.5), r"SGD\(weight_decay=0.5\) moves"),
    "Adagrad's decay": (
        lambda own: torch.optim.Adagrad(own, weight_decay=0.5),
        r"Adagrad\(weight_decay=0.5\)",
    ),
    "Adam": (torch.optim.Adam, "Adam takes no sparse gradients: leave sparse=True out, or use SGD"),
    "AdamW": (torch.optim.AdamW, "AdamW takes no sparse gradients"),
    "SparseAdam": (torch.optim.SparseAdam, r"a parameter of shape \(4, 1\) has dense ones"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_would_move_untouched_rows_is_refused(name):
    make, told = REFUSED[name]
    model = sparse_jobs.Summed(nn.Embedding, True)
    with pytest.raises(UsageError, match=told):
        check_sparse_optimizer(model, make(list(model.parameters())))
    if name != "SparseAdam":
        dense = sparse_jobs.Summed(nn.Embedding, False)
        check_sparse_optimizer(dense, make(list(dense.parameters())))


def test_groups_of_dense_parameters_have_any_options():
    model = sparse_jobs.Summed(nn.Embedding, True)
    groups = [{"params": model.table.parameters()}, {"params": model.bias.parameters(), "momentum": 0.9}]
    check_sparse_optimizer(model, torch.optim.SGD(groups, lr=0.1))
    check_sparse_optimizer(model, torch.optim.SparseAdam(list(model.table.parameters())))


def test_a_table_that_the_loss_leaves_out_is_named_in_place_of_the_words_of_ddp():
    model = nn.ModuleDict({"used": sparse_jobs.Summed(nn.Embedding, True), "not": TABLES[0]})
    loss = model["used"](torch.tensor([[1, 2]])).sum()
    told = r"depend on not in this step.*table\(words\[:0\]\)"
    with pytest.raises(UsageError, match=told), explained_tables(model, loss):
        raise RuntimeError("Expected sparse gradient to be defined.")
    with pytest.raises(RuntimeError, match="another"), explained_tables(model, loss):
        raise RuntimeError("another")


def test_in_virtual_time_too_a_table_that_is_left_out_ends_the_run(tmp_path):
    class Two(sparse_jobs.Summed):
        def __init__(self):
            super().__init__(nn.Embedding, True)
            self.spare = nn.Embedding(4, 2, sparse=True)

    job = sparse_jobs.make_job(model=Two, find_unused_parameters=True)
    with pytest.raises(UsageError, match="depend on spare in this step"):
        mt.simulate(job, mt.AllReduce(), workers=2, run_dir=str(tmp_path), quiet=True)


@pytest.mark.parametrize(
    "clipping", [Clipping(norm=0.1), Clipping(value=0.05), Clipping(norm=0.1, value=0.01)]
)
def test_clipping_the_rows_clips_the_dense_gradient(clipping):
    words, gradients = torch.tensor([[3, 3, 7], [7, 9, 3]]), []
    for sparse in (True, False):
        model = sparse_jobs.Summed(nn.Embedding, sparse)
        (model(words) ** 2).sum().backward()
        clipping.clip(numbers_of_gradients(model.parameters()))
        gradients.append([one.grad.to_dense() for one in model.parameters()])
    torch.testing.assert_close(*gradients)
