"""Adagrad by rows: the formula, and sparse gradients as dense ones."""

import pytest
import torch
from torch import nn

import mpitrain as mt
from mpitrain.errors import UsageError


def trained(sparse, make, rowwise):
    torch.manual_seed(3)
    table = nn.Embedding(50, 6, sparse=sparse)
    table.weight.rowwise = rowwise
    optimizer = make(table.parameters())
    for step in range(5):
        ids = torch.randperm(50, generator=torch.Generator().manual_seed(step))[:24].view(8, 3)
        optimizer.zero_grad()
        (table(ids).sum(1) ** 2).mean().backward()
        optimizer.step()
    return table.weight.detach(), optimizer.state[table.weight]["sum"]


def make(parameters):
    return mt.RowwiseAdagrad(parameters, lr=0.5, initial_accumulator_value=0.25)


def test_sparse_gradients_train_the_bits_of_dense_ones():
    for one, other in zip(trained(True, make, True), trained(False, make, True), strict=True):
        assert torch.equal(one, other)
    assert trained(True, make, True)[1].shape == (50, 1)


def test_elsewhere_it_is_torch_s_adagrad():
    def adagrad(parameters):
        return torch.optim.Adagrad(parameters, lr=0.5, initial_accumulator_value=0.25, eps=1e-10)

    for one, other in zip(trained(False, make, False), trained(False, adagrad, False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


def test_the_formula():
    table = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    optimizer = mt.RowwiseAdagrad([table], lr=0.5, eps=0.0)
    table.grad = torch.sparse_coo_tensor([[1, 1]], [[1.0, 1.0], [2.0, 3.0]], (2, 2))
    optimizer.step()
    root = ((3.0**2 + 4.0**2) / 2) ** 0.5
    expected = torch.tensor([[1.0, 2.0], [3.0 - 0.5 * 3.0 / root, 4.0 - 0.5 * 4.0 / root]])
    torch.testing.assert_close(table.detach(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("option", ["lr", "eps", "initial_accumulator_value"])
def test_what_makes_no_sense_is_refused(option):
    with pytest.raises(UsageError, match=f"{option} must be at least 0, got -1"):
        mt.RowwiseAdagrad([nn.Parameter(torch.zeros(1))], **{option: -1.0})
