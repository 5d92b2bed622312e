"""A server's tables against the same rows as dense numbers: a sparse push equals a dense push, to the bit."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn

import mpitrain as mt
from mpitrain.embedding.lookups import HeldRows
from mpitrain.embedding.sections import Section, What, join
from mpitrain.model import flat_model, shard_store
from mpitrain.model.shards.reshard import reshard
from mpitrain.model.wire.buffers import VariableBuffer

ROWS, WIDTH = 40, 3
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=2.0**-3),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5),
    "adagrad, decaying": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, lr_decay=0.25),
    "rowwise": lambda parameters: mt.RowwiseAdagrad(parameters, lr=0.1, initial_accumulator_value=0.5),
    "maximize": lambda parameters: torch.optim.SGD(parameters, lr=0.1, maximize=True),
}


class Model(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table, self.head = nn.Embedding(ROWS, WIDTH, sparse=sparse), nn.Linear(WIDTH, 1)
        with torch.no_grad():
            self.table.weight.copy_(torch.arange(ROWS * WIDTH).reshape(ROWS, WIDTH) / 64)
            self.head.weight.fill_(0.5)
            self.head.bias.zero_()


def made(sparse, optimizer, strategy):
    module = Model(sparse)
    optimizer = OPTIMIZERS[optimizer](module.parameters())
    model = flat_model(module, optimizer, strategy)
    stores = [shard_store(model, shard, optimizer, strategy) for shard in range(strategy.servers)]
    return module, model, stores


def draw(number):
    """(ids, gradients of their rows, gradient of the rest), dyadic; that of number 0 touches no row."""
    generator = np.random.default_rng(number)
    ids = np.sort(generator.choice(ROWS, generator.integers(0, 9) if number else 0, replace=False))
    values = torch.from_numpy(generator.integers(-8, 9, (len(ids), WIDTH)) / 16).float()
    return ids, values, torch.from_numpy(generator.integers(-8, 9, WIDTH + 1) / 16).float()


def push_sparse(model, stores, worker, number, weight, drawn=None):
    ids, values, dense = drawn or draw(number)
    lookups = model.lookups
    sections = HeldRows(lookups, torch.float32)._parted(What.ROWS, [ids], [values])
    for shard, store in enumerate(stores):
        low, high = model.layout.cuts[shard : shard + 2]
        message = join([Section(What.DENSE, values=dense[low:high]), *sections[shard]], lookups.sizes(shard))
        store.add(worker, store.arrive(worker, VariableBuffer(message)), weight)


def push_dense(model, stores, worker, number, weight):
    ids, values, dense = draw(number)
    whole = torch.zeros(ROWS, WIDTH)
    whole[ids] = values
    flat = torch.cat([whole.reshape(-1), dense])
    for shard, store in enumerate(stores):
        buffer = store.wire_buffer()
        buffer.body.copy_(flat[model.layout.cuts[shard] : model.layout.cuts[shard + 1]])
        store.add(worker, buffer, weight)


def numbers(sparse, model, stores):
    if not sparse:
        return torch.cat([store.live.body for store in stores])
    table = torch.empty(ROWS, WIDTH)
    for store in stores:
        state = store.tables[0].state()
        table[state["ids"]] = state["rows"]
    return torch.cat([table.reshape(-1), *[store.live.body for store in stores]])


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.5, 1.0, 0.25)])
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS.keys() - {"rowwise"}))
def test_a_sparse_push_equals_a_dense_push(optimizer, servers, weights):
    strategy, found = mt.Sync(servers=servers), []
    for sparse, push in ((True, push_sparse), (False, push_dense)):
        _, model, stores = made(sparse, optimizer, strategy)
        number = 0
        for count in (1, 3, 2, 3, 1):
            for worker in range(count):
                push(model, stores, worker, number, weights[worker])
                number += 1
            for store in stores:
                store.apply()
        found.append(numbers(sparse, model, stores))
    assert torch.equal(*found)


def test_the_order_of_duplicates_changes_no_bit():
    ids, found = [3, 7, 3, 3, 9], []
    for order in itertools.permutations(range(len(ids))):
        module, model, _ = made(True, "adagrad", mt.Sync())
        rows = HeldRows(model.lookups, torch.float32)
        rows.take(0, [Section(What.ROWS, 0, np.array([0, 1, 2]), torch.ones(3, WIDTH))], anew=True)
        partition = model.lookups.partitions[0]
        _, slots = partition.place(np.array([3, 7, 9]))
        rows.take(0, [Section(What.ROWS, 0, np.sort(slots), torch.ones(3, WIDTH))], anew=True)
        model.lookups.present = rows
        rows.begin_step()
        words = torch.tensor([ids[at] for at in order])
        weights = torch.tensor([2.0**-at for at in order]).unsqueeze(1)
        (module.table(words) * weights).sum().backward()
        found.append(rows.gradients()[0])
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_goes_on_with_another_number_of_servers(optimizer):
    """3 servers for two updates, then 2 for two more: the bits of 1 server for four."""
    _, model, stores = made(True, optimizer, mt.Sync(servers=3))
    _, alone_model, alone = made(True, optimizer, mt.Sync())
    for number in range(2):
        push_sparse(model, stores, 0, number, 1.0)
        push_sparse(alone_model, alone, 0, number, 1.0)
        for store in (*stores, *alone):
            store.apply()
    states = [store.state() for store in stores]
    _, model, stores = made(True, optimizer, mt.Sync(servers=2))
    for shard, store in enumerate(stores):
        store.restore(reshard(copy.deepcopy(states), model.layout, shard, [0, 0, 0]))
    for number in range(2, 4):
        push_sparse(model, stores, 0, number, 1.0)
        push_sparse(alone_model, alone, 0, number, 1.0)
        for store in (*stores, *alone):
            store.apply()
    assert torch.equal(numbers(True, model, stores), numbers(True, alone_model, alone))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_server_whose_rows_nobody_has_touched_hands_over_what_it_began_with(optimizer):
    """2 servers, of which one has a gradient of rows; then 1, and the rows of the other."""
    _, model, stores = made(True, optimizer, mt.Sync(servers=2))
    _, alone_model, alone = made(True, optimizer, mt.Sync())
    where, _ = model.lookups.partitions[0].place(np.arange(ROWS))
    turns = [
        (
            np.flatnonzero(where == server),
            torch.full((sum(where == server), WIDTH), 0.25),
            torch.ones(WIDTH + 1),
        )
        for server in range(2)
    ]
    for some, them in ((model, stores), (alone_model, alone)):
        push_sparse(some, them, 0, 0, 1.0, turns[0])
        for store in them:
            store.apply()
    states = [store.state() for store in stores]
    _, model, stores = made(True, optimizer, mt.Sync())
    stores[0].restore(reshard(states, model.layout, 0, [0, 0]))
    for some, them in ((model, stores), (alone_model, alone)):
        push_sparse(some, them, 0, 0, 1.0, turns[1])
        them[0].apply()
    assert torch.equal(numbers(True, model, stores), numbers(True, alone_model, alone))


def test_rows_that_an_old_shard_has_taken_are_left_out_of_a_push():
    """Of two old shards the second had processed a push before the first: of its rows nothing is added again."""
    _, model, stores = made(True, "sgd", mt.Sync(servers=2))
    for store in stores:
        store.add(
            0,
            store.arrive(0, VariableBuffer(join([Section(What.DENSE, values=torch.zeros(2))], [20, 20]))),
            1.0,
        )
        store.apply()
    owner = {
        int(number): shard for shard, store in enumerate(stores) for number in store.tables[0].state()["ids"]
    }
    _, model, (alone,) = made(True, "sgd", mt.Sync())
    alone.restore(reshard([store.state() for store in stores], model.layout, 0, [0, 0]))
    before = numbers(True, model, [alone])[: ROWS * WIDTH].view(ROWS, WIDTH)
    ids, values, dense = draw(5)
    sections = HeldRows(model.lookups, torch.float32)._parted(What.ROWS, [ids], [values])[0]
    push = alone.arrive(0, VariableBuffer(join([Section(What.DENSE, values=dense), *sections], [ROWS])))
    alone.mask_rows(push, {1})
    alone.add(0, push, 1.0)
    alone.apply()
    after = numbers(True, model, [alone])[: ROWS * WIDTH].view(ROWS, WIDTH)
    for at, number in enumerate(ids):
        expected = before[number] - (owner[int(number)] == 0) * values[at] * 2.0**-3
        assert torch.equal(after[number], expected)
    assert {owner[int(number)] for number in ids} == {0, 1}
