"""A model split by layers: every parameter in one stage, under its own name."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mpitrain.errors import UsageError
from mpitrain.model.building.pipeline_stages import cut, keep_only, split_stages


@given(st.lists(st.integers(0, 50), min_size=1, max_size=7), st.data())
def test_the_largest_run_is_as_small_as_it_can_be(sizes, data):
    count = data.draw(st.integers(1, len(sizes)))
    runs = cut(sizes, count)
    assert [stop for _, stop in runs][-1] == len(sizes) and len(runs) == count
    assert [start for start, _ in runs] == [0, *(stop for _, stop in runs[:-1])]
    assert all(start < stop for start, stop in runs)
    every = ([0, *inner, len(sizes)] for inner in combinations(range(1, len(sizes)), count - 1))
    best = min(max(sum(sizes[a:b]) for a, b in zip(ends, ends[1:])) for ends in every)
    assert max(sum(sizes[start:stop]) for start, stop in runs) == best


class Named(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])
        self.head = nn.Linear(4, 8)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.layers[1](self.layers[0](self.embed(x))))


LAYERS = ("embed", "layers.0", "layers.1", "head")


def test_stages_called_in_turn_are_the_model_and_know_its_names():
    model = Named().eval()
    stages = split_stages(model, 3, LAYERS)
    x = torch.arange(8)
    out = x
    for stage in stages:
        out = stage.module(out)
    assert torch.equal(out, model(x))
    assert [name for stage in stages for name in stage.names] == list(model.state_dict())
    for stage in stages:
        for whole, own in stage.names.items():
            assert torch.equal(stage.module.state_dict()[own], model.state_dict()[whole])


def test_a_function_may_split_as_it_likes():
    model = Named()
    stages = split_stages(
        model, 2, lambda model, count: [model.embed, nn.Sequential(*model.layers, model.head)]
    )
    assert stages[0].names == {"embed.weight": "weight"} and stages[1].num_parameters == 20 + 8 + 40


@pytest.mark.parametrize(
    ("model", "count", "how", "said"),
    [
        (Named(), 2, None, "cannot name the layers of Named"),
        (Named(), 2, ("embed", "body"), "no submodule 'body'; its children are embed, layers, head"),
        (Named(), 5, LAYERS, "4 layer"),
        (Named(), 2, ("embed", "head"), "parameter layers.0.weight is in no stage"),
        (Named(tied=True), 2, LAYERS, "embed.weight is in stage 0 and in stage 1: tied"),
        (Named(), 2, lambda model, count: [model.embed], "must return 2 modules, got 1"),
        (nn.Sequential(nn.Linear(1, 1)), 2, None, "1 layer"),
    ],
)
def test_models_that_cannot_be_split_are_refused(model, count, how, said):
    with pytest.raises(UsageError, match=said):
        split_stages(model, count, how)


def test_the_optimizer_of_a_stage_keeps_groups_and_options():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.Adagrad(
        [
            {"params": [model[0].weight, model[1].weight]},
            {"params": [model[0].bias, model[1].bias], "lr": 0.5},
        ],
        lr=0.1,
    )
    keep_only(optimizer, model[1])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert [group["params"] for group in optimizer.param_groups] == [[model[1].weight], [model[1].bias]]
    assert set(optimizer.state) == {model[1].weight, model[1].bias}
