"""What ranks need, in multiples of the model: counted by hand from what each role keeps."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mpitrain.model.optimizers.sliced_step import SlicedStep
from mpitrain.roles.server import gathering
from mpitrain.strategies.placement import assign
from mpitrain.training import memory
from mpitrain.training.memory import (
    Messages,
    dense_messages,
    describe_memory,
    memory_needs,
    sizes_of,
    tell_memory,
)
from mpitrain.values import parse

P = 4 * 1000 * 1000


def needs(text, optimizer, num_workers, dtype=torch.float32):
    module, strategy = nn.Sequential(nn.Linear(1000, 1000, bias=False, dtype=dtype)), parse(text, "strategy")
    sizes, model = sizes_of(module, optimizer(module.parameters()), strategy), P * dtype.itemsize // 4
    found = memory_needs(strategy, sizes, Messages(num_workers, model, model))
    return {need.who: need.num_bytes / model for need in found}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters)


@pytest.mark.parametrize(("text", "optimizer", "num_workers", "expected"), [
    # parameters, gradients, and a layer's gradient before it is in its bucket; Adam: two moments, two temporaries
    ("allreduce()", sgd, 2, {"each worker": 3}),
    ("allreduce()", momentum, 2, {"each worker": 4}),
    ("allreduce()", adam, 2, {"each worker": 6}),
    # a server: the model that it builds, where the first push comes to be, its shard, other pushes, Adam's moments;
    # of several workers, a version of the shard that is on its way to one of them
    ("sync()", sgd, 1, {"each server": 2, "each worker": 3}),
    ("async()", sgd, 4, {"each server": 6, "each worker": 3}),
    ("async()", adam, 4, {"each server": 8, "each worker": 3}),
    ("async(servers=2)", adam, 4, {"each server": 1 + (1 + 2 + 3 + 1) / 2, "each worker": 3}),
    ("async(optimizer='worker')", adam, 1, {"each server": 2, "each worker": 3 + 2 + 2}),
    ("async(inflight=2)", sgd, 1, {"each server": 3, "each worker": 4}),
    ("localsgd(period=2)", momentum, 2, {"each worker": 3}),
    ("localsgd(period=2,outer=diloco())", momentum, 2, {"each worker": 5}),
    ("localsgd(period=2,wire='int8')", sgd, 2, {"each worker": 2 + 1 + 1.5}),
    # a peer: its update, the one that leaves, and one of each other peer
    ("decentralized()", sgd, 3, {"each worker": 2 + 2 + 2}),
])  # fmt: skip
def test_a_rank_needs_so_many_times_the_model(text, optimizer, num_workers, expected):
    assert needs(text, optimizer, num_workers) == pytest.approx(expected, rel=1e-3)


def test_a_step_in_slices_makes_next_to_nothing_unless_a_hook_has_it_taken_whole(monkeypatch):
    def hooked(parameters):
        optimizer = adam(parameters)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    monkeypatch.setattr(SlicedStep, "slice_bytes", P // 1000)
    for optimizer, made in ((adam, 0.002), (hooked, 2)):
        found = needs("localsgd(period=2)", optimizer, 2)
        assert found == pytest.approx({"each worker": 4 + made}, abs=1e-6)


@pytest.mark.parametrize(("text", "num_workers", "expected"), [
    # the model, its shard and Adam's moments, and beside the first push one that arrives, or one more out of turn
    ("async()", 1, 4), ("async()", 2, 6), ("async()", 64, 6), ("sync()", 2, 6), ("sync()", 64, 7),
    # nobody knows who comes first: all that an update is made of
    ("softsync(updates=8)", 64, 5 + 8), ("backup(spare=4)", 64, 5 + 60),
])  # fmt: skip
def test_large_pushes_stay_with_the_workers(text, num_workers, expected, monkeypatch):
    for module in (memory, gathering):
        monkeypatch.setattr(module, "WAITING_BYTES", P)
    assert needs(text, adam, num_workers)["each server"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("text", "expected"), [
    # the model, a push of each of three workers, and what answers them: one reply for all who wait for one another
    ("sync()", 1 + 3 + 1), ("async()", 1 + 3 + 3), ("async(inflight=2)", 1 + 6 + 3), ("sync(servers=2)", 1 + 3 + 1),
])  # fmt: skip
def test_an_aggregator_holds_what_passes_through_it(text, expected):
    module, strategy = nn.Sequential(nn.Linear(1000, 1000, bias=False)), parse(text, "strategy")
    roles = assign(
        (0,) * 4 + (1,) * 4 + (2,) * 4, strategy.num_servers(), strategy.placement, aggregates=True
    )
    sizes = sizes_of(module, sgd(module.parameters()), strategy)
    *_, need = memory_needs(strategy, sizes, dense_messages(strategy, module, roles))
    assert need.who == "each aggregator" and need.num_bytes / P == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("text", "optimizer", "num_workers", "expected"), [
    ("allreduce()", momentum, 2, {"each worker": 4}),
    # a server: the model, and in 32 bits its shard, momentum and a widened push; a push and a reply as they travel
    ("sync()", momentum, 1, {"each server": 1 + 2 + 2 + 2 + 1 + 1, "each worker": 3}),
    # a worker: parameters, gradients, push and reply; masters, their gradients, Adam's moments and two temporaries
    ("async(optimizer='worker')", adam, 2, {"each server": 1 + 2 + 2 + 2 + 4 + 1 + 1, "each worker": 4 + 4 + 4 + 4}),
    # a peer: parameters and gradients; masters, their gradients and an update; what leaves and arrives
    ("decentralized()", sgd, 3, {"each worker": 2 + 4 + 2 + 1 + 2}),
])  # fmt: skip
def test_a_model_in_16_bits_is_held_in_32_where_it_is_stepped(text, optimizer, num_workers, expected):
    assert needs(text, optimizer, num_workers, torch.bfloat16) == pytest.approx(expected, rel=1e-3)


def told_on(rank, left_bytes, monkeypatch, capsys):
    """What rank 0 reports, and the warning, of `async()` on two nodes of two ranks, the first of which serves."""
    strategy = parse("async()", "strategy")
    runtime = SimpleNamespace(
        rank=rank, local_rank=rank % 2, nodes=(0, 0, 1, 1), hosts=("a", "a", "b", "b"), num_threads=None
    )
    report, session = [], SimpleNamespace(runtime=runtime, strategy=strategy, device=torch.device("cpu"))
    session.roles = assign((0, 0, 1, 1), 1, "spread")
    session.report = SimpleNamespace(event=lambda name, **fields: report.append((name, *fields)))
    session.overrides = SimpleNamespace(checkpoint_pause=False)
    module = nn.Linear(1000, 1000, bias=False)
    monkeypatch.setattr(memory, "available_bytes", lambda num_sharing: left_bytes / num_sharing)
    tell_memory(session, module, adam(module.parameters()))
    return report, capsys.readouterr().err


def test_a_node_that_has_less_than_its_ranks_need_is_warned_of(monkeypatch, capsys):
    # beside the model that is there, on the first node: of a server its shard, moments, two pushes and a version, of a
    # worker two
    report, warning = told_on(0, 8.1 * P, monkeypatch, capsys)
    assert (
        report == [("memory", "each server", "each worker", "checkpoint_copy", "not_counted")] and not warning
    )
    _, warning = told_on(0, 7.9 * P, monkeypatch, capsys)
    assert (
        "warning: a: its 2 ranks will need 30.5 MiB more than they have, and 30.1 MiB can be had" in warning
    )
    for rank, left, expected in ((2, 4.1, ""), (2, 3.9, "b: its 2 ranks"), (1, 0, ""), (3, 0, "")):
        report, warning = told_on(rank, left * P, monkeypatch, capsys)
        assert not report and (expected in warning if expected else not warning)


def test_what_is_told_adds_up_and_fits_a_terminal():
    module = nn.Linear(1000, 1000, bias=False)
    found = memory_needs(
        parse("sync()", "strategy"),
        sizes_of(module, adam(module.parameters()), parse("sync()", "strategy")),
        Messages(3, P, P),
    )
    lines = describe_memory(found, 2**28)
    assert lines[0] == "memory      each server: 282.7 MiB"  # 256 MiB and 7 times 4 MB
    assert "arriving pushes" in "".join(lines) and max(map(len, lines)) <= 80
    # a server's shard and Adam's moments; of a worker's state nothing is in a checkpoint
    assert "while a checkpoint is written: each server 11.4 MiB more" in "".join(lines)


@pytest.mark.parametrize(("text", "expected"), [
    ("allreduce()", {"each worker": 3}), ("decentralized()", {"each worker": 3}),
    ("localsgd(period=2,outer=diloco())", {"each worker": 5}), ("async(servers=2)", {"each server": 1.5}),
    ("async(optimizer='worker')", {"each server": 1, "each worker": 2}),
])  # fmt: skip
def test_a_checkpoint_is_a_copy_of_what_a_run_goes_on_from(text, expected):
    module, strategy = nn.Sequential(nn.Linear(1000, 1000, bias=False)), parse(text, "strategy")
    found = memory_needs(strategy, sizes_of(module, adam(module.parameters()), strategy), Messages(2, P, P))
    copied = {need.who: need.checkpoint_bytes / P for need in found if need.checkpoint_bytes}
    assert copied == pytest.approx(expected, rel=1e-3)
