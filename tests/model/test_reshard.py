"""Shards whose replies are coded, cut anew."""

import torch
from torch import nn

from mpitrain.model import FixedBuffer, FlatModel, ShardStore, reshard
from mpitrain.model.wire.flat import make_layout
from mpitrain.model.wire.reply_codec import ReplyReader
from mpitrain.strategies import Async, EightBit


def stores(module, num_shards):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    layout = make_layout(module, optimizer, num_shards)
    wire_buffers = FlatModel(module, optimizer, num_shards).wire_buffers
    return layout, [
        ShardStore(layout, shard, wire_buffers[shard].body, optimizer, Async(reply_wire=EightBit()))
        for shard in range(num_shards)
    ]


def test_a_worker_is_told_a_shard_that_was_cut_anew_in_full():
    module = nn.Linear(37, 11)
    _, before = stores(module, 2)
    for store in before:
        store.read(worker=3).release()
    layout, (after,) = stores(module, 1)
    after.restore(reshard([store.state() for store in before], layout, 0))
    whole = torch.cat([store.live.body for store in before])
    told = ReplyReader(layout).take(0, after.read(worker=3))
    assert isinstance(told, FixedBuffer) and torch.equal(told.body, whole)
