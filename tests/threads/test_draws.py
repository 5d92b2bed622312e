"""Whose random numbers a replica draws, where its model begins to draw late."""

import threading

import pytest
import torch
from torch import nn

from mpitrain.system.draws import LOCK
from mpitrain.threads.draws import Draws


class Turns:
    """How often the lock was asked for."""

    def __init__(self):
        self.number = 0

    def __call__(self):
        self.number += 1
        LOCK.acquire()


def gradient(draws, rank, turns, compute):
    with draws.own(rank, turns):
        torch.default_generator.manual_seed(100 + rank)
        return compute(torch.ones(2, 4, 4))


@pytest.mark.parametrize(
    ("make", "begin"),
    [
        (lambda: nn.Dropout(0.0), lambda one: setattr(one, "p", 0.5)),
        (lambda: nn.FeatureAlphaDropout(0.0), lambda one: setattr(one, "p", 0.5)),
        (lambda: nn.RReLU(0.2, 0.2), lambda one: setattr(one, "upper", 0.9)),
        (lambda: nn.LSTM(4, 4, 2), lambda one: setattr(one, "dropout", 0.5)),
    ],
    ids=["dropout", "alpha", "rrelu", "lstm"],
)
def test_a_layer_that_gets_a_share_to_drop_takes_turns_from_then_on(make, begin):
    draws, turns, layer = Draws(), Turns(), make()
    if isinstance(layer, nn.RReLU):
        layer.upper = layer.lower
    draws.watch(nn.Sequential(nn.Linear(4, 4), layer))
    for _ in range(2):
        for rank in range(2):
            gradient(draws, rank, turns, lambda x: x.sum())
    assert turns.number == 2 and not draws.drawn
    begin(layer)
    for _ in range(2):
        gradient(draws, 1, turns, layer)
    assert turns.number == 4 and draws.drawn


def test_what_draws_unannounced_is_told_and_takes_turns_from_then_on(capsys):
    draws, turns = Draws(), Turns()
    for rank in range(2):
        gradient(draws, rank, turns, lambda x: x.sum())
    for _ in range(2):  # this thread's own are told; those of a thread beside it move the same generator
        gradient(draws, 0, turns, torch.rand_like)
    assert turns.number == 3 and draws.drawn
    assert capsys.readouterr().err.count("the gradient of rank 0 was computed") == 1
    found = []
    beside = threading.Thread(target=lambda: found.append(gradient(draws, 1, Turns(), torch.rand_like)))
    with LOCK:
        beside.start()
        mine = gradient(draws, 0, turns, torch.rand_like)
    beside.join(30)
    torch.manual_seed(100)
    assert torch.equal(mine, torch.rand(2, 4, 4)) and not torch.equal(mine, found[0])
