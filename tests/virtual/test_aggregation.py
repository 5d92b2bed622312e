"""Aggregators in virtual time: the same roles, gradients and counts, and fewer messages at the servers."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.effects import Compute, Recv, Send
from mpitrain.errors import DeadlockError, LostRankError, UsageError, WireError
from mpitrain.messages import NOT_SENT, Bundle, CheckpointRequest, Done, Entry, Idle, Join, Note, Push, Reply
from mpitrain.model.wire.buffers import FixedBuffer
from mpitrain.model.wire.node_sums import NodeSums
from mpitrain.roles.aggregator import Aggregator
from mpitrain.simulation.timing import Circumstances, Workload, time_run
from mpitrain.strategies import Async, SoftSync, StaleSync, Sync
from mpitrain.virtual import Cluster, Constant, Costs, Exponential, Ideal, LogNormal, VirtualWorld
from tests import toy

NODES = Cluster(ranks_per_node=4)
COUNTS = (
    "status", "samples", "steps", "accepted", "late", "dropped", "nonfinite", "staleness_histogram", "versions_skipped",
)  # fmt: skip


def run(path, job, strategy, workers=6, **options):
    options = {"network": NODES, "compute": Exponential()} | options
    return mt.simulate(job, strategy, workers, run_dir=str(path), quiet=True, **options)


@pytest.fixture
def sent(monkeypatch):
    """All messages of a run, as (source, to, message)."""
    found = []
    send = VirtualWorld._send

    def follow(self, source, effect):
        found.append((source, effect.to, effect.message))
        send(self, source, effect)

    monkeypatch.setattr(VirtualWorld, "_send", follow)
    return found


def same(one, other):
    first, second = load_file(one["model"]), load_file(other["model"])
    return all(torch.equal(first[name], second[name]) for name in first | second)


@pytest.mark.parametrize("kind", toy.DYADIC)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("network", [Ideal(), NODES], ids=["one node", "nodes"])
def test_sums_of_nodes_make_the_same_bits_and_counts(tmp_path, kind, servers, network):
    """38 samples: the last round is one of fewer workers, and the last batch is a short one."""
    job = toy.make_job(**toy.DYADIC[kind] | {"epochs": 1, "data": toy.Memory(38)}, batch_size=4)
    direct = run(tmp_path / "direct", job, Sync(servers=servers), network=network)
    summed = run(tmp_path / "summed", job, Sync(servers=servers, aggregate="node"), network=network)
    assert same(direct, summed) and summed["aggregators"] == (1 if network == Ideal() else 2)
    for direct_shard, shard in zip(direct["shards"], summed["shards"], strict=True):
        for name in COUNTS[3:]:
            assert shard[name] == direct_shard[name], name
    assert all(summed[name] == direct[name] for name in COUNTS[:3])
    rows = [
        [{key: row[key] for key in ("steps", "samples")} for row in one["per_worker"]]
        for one in (direct, summed)
    ]
    assert rows[0] == rows[1]
    assert summed["pushed_bytes"] < direct["pushed_bytes"]


def test_timing_changes_no_bit_of_a_sum(tmp_path):
    """Float32 on no dyadic grid, momentum, dropout, a ragged end, and samples that weigh differently."""
    for index, changes in enumerate(
        [{"data": toy.Memory(50), "batch_size": 3}, toy.WEIGHTED | {"batch_size": 3}]
    ):
        job = toy.make_job(**changes)
        laws = (Constant(1.0, 0.0), LogNormal(1.0, 1.0), Exponential(), Constant(1.0, 0.9))
        runs = [
            run(tmp_path / f"{index}-{number}", job, Sync(servers=2, aggregate="node"), compute=law)
            for number, law in enumerate(laws)
        ]
        assert all(same(runs[0], one) for one in runs[1:])
        direct = run(tmp_path / f"{index}-direct", job, Sync(servers=2))
        for name, tensor in load_file(direct["model"]).items():
            torch.testing.assert_close(load_file(runs[0]["model"])[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_mean_is_clipped_by_all_servers_together(tmp_path):
    job = toy.make_job(model=toy.smooth, clip_norm=0.1, batch_size=4)
    direct, summed = (
        load_file(run(tmp_path / name, job, Sync(servers=3, aggregate=name))["model"])
        for name in ("none", "node")
    )
    for name, tensor in direct.items():
        torch.testing.assert_close(summed[name], tensor, rtol=1e-4, atol=1e-6)


def test_a_server_exchanges_one_message_with_a_node(tmp_path, sent):
    """Eight updates of six workers on two nodes: a sum and an answer a node, where there were six of each."""
    job = toy.make_job(batch_size=6, epochs=1, data=toy.Memory(6 * 6 * 8))
    counted = {}
    for aggregate in ("none", "node"):
        sent.clear()
        result = run(tmp_path / aggregate, job, Sync(aggregate=aggregate), network=Cluster(ranks_per_node=5))
        assert (result["status"], result["accepted"]) == ("ok", 48)
        server = 4
        pushes = [m for _, to, m in sent if to == server and holds(m, Push)]
        answers = [m for source, _, m in sent if source == server and holds(m, Reply)]
        payloads = sum(
            entry.message.payload is not NOT_SENT
            for m in pushes
            for entry in (m.entries if isinstance(m, Bundle) else [Entry(0, 0, m)])
            if isinstance(entry.message, Push)
        )
        counted[aggregate] = len(pushes), len(answers), payloads
    assert counted["none"] == (48, 54, 48)
    pushes, answers, payloads = counted["node"]
    assert (pushes, payloads) == (
        16,
        16,
    ) and 16 <= answers <= 16 + 6  # first come the models, as workers join


def holds(message, kind):
    if isinstance(message, Bundle):
        return any(isinstance(entry.message, kind) for entry in message.entries)
    return isinstance(message, kind)


FORWARDED = [
    Async(aggregate="node"),
    Async(servers=2, aggregate="node", inflight=2),
    Async(servers=2, aggregate="node", push_every=2, pull_every=4),
    SoftSync(updates=4, aggregate="node"),
    SoftSync(updates=4, blocking=True, aggregate="node"),
    StaleSync(bound=1, servers=2, aggregate="node"),
    Async(aggregate="node", push_wire=mt.TopK(), reply_wire=mt.TopK()),
]


@pytest.mark.parametrize("strategy", FORWARDED, ids=str)
@pytest.mark.parametrize("network", [Ideal(), NODES], ids=["one node", "nodes"])
def test_what_is_passed_on_is_judged_singly(tmp_path, strategy, network):
    job = toy.make_job(batch_size=3, epochs=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.01))
    result = run(tmp_path / "run", job, strategy, network=network)
    assert (result["status"], result["samples"]) == ("ok", 96)
    for shard in result["shards"]:
        assert shard["accepted"] == sum(shard["staleness_histogram"].values())
        assert shard["accepted"] == sum(row["steps"] for row in result["per_worker"])
        assert shard["samples_accepted"] == 96
        left, right = shard["staleness_identity"]
        assert left == right


def test_a_busy_server_finds_fewer_and_larger_bundles():
    """An update takes as long as a gradient, so seven of eight pushes wait."""
    load = Workload(num_parameters=1000, num_samples=800, step_samples=1, epochs=1)
    counts = {}
    for name, gb_per_s in (("idle", 0.0), ("busy", 3 * 4000 / 1e9)):
        costs = Costs(memory_gb_per_s=gb_per_s)
        found = time_run(
            Async(aggregate="node"), load, 8, Constant(1.0, 0.3), under=Circumstances(costs=costs)
        )
        assert found["accepted"] == 800
        counts[name] = sum(row["bundles"] for row in found["per_aggregator"])
    assert counts["busy"] < counts["idle"] / 2


def test_a_run_that_is_only_timed_takes_the_same_time(tmp_path):
    """And the same messages, with gradients and without."""
    job = toy.make_job(batch_size=4)
    numbers = sum(parameter.numel() for parameter in job.model().parameters())
    load = Workload(num_parameters=numbers, num_samples=48, step_samples=4, epochs=2)
    for strategy in (Sync(aggregate="node"), Async(aggregate="node")):
        trained = run(tmp_path / strategy.name, job, strategy)
        timed = time_run(strategy, load, 6, Exponential(), NODES, seed=job.seed)
        assert timed["virtual_s"] == trained["virtual_s"] and timed["aggregators"] == 2
        assert timed["staleness_histogram"] == trained["staleness_histogram"]


def test_a_gradient_that_is_not_finite_enters_no_sum(tmp_path):
    job = toy.make_job(batch_size=4, data=toy.Memory(96))
    result = run(tmp_path, job, Sync(aggregate="node"), inject="nan(1,2)")
    assert result["status"] == "fail" and "the gradient is not finite" in result["failure"]
    assert all(torch.isfinite(tensor).all() for tensor in load_file(result["model"]).values())
    assert result["nonfinite"] == 1


def test_what_cannot_be_survived_is_said(tmp_path):
    job = toy.make_job(batch_size=4)
    with pytest.raises(LostRankError, match="nobody can go on"):
        run(tmp_path / "kill", job, Sync(aggregate="node"), inject="kill(1,3)")
    with pytest.raises(DeadlockError, match="waits since"):
        run(tmp_path / "hang", job, Sync(aggregate="node"), inject="stop(1,3)")
    skipping = toy.make_job(batch_size=4, on_nonfinite="skip")
    with pytest.raises(UsageError, match='on_nonfinite="skip" has servers give up'):
        run(tmp_path / "skip", skipping, Sync(aggregate="node"))
    assert run(tmp_path / "on", skipping, Async(aggregate="node"))["accepted"]


# ---- the role by itself


class Desk:
    """Drives an aggregator by hand; `out` is what it has sent."""

    def __init__(self, sums=True, servers=(0,), members=(2, 3, 4)):
        self.aggregator = Aggregator(9, servers, members, NodeSums(torch.float32) if sums else None)
        self.role, self.out, self.ended = self.aggregator.run(), [], None
        self._advance(None)

    def _advance(self, answer):
        try:
            while not isinstance(effect := self.role.send(answer), Recv):
                answer = effect.task() if isinstance(effect, Compute) else None
                if isinstance(effect, Send):
                    self.out.append((effect.to, effect.message.entries))
        except StopIteration as end:
            self.ended = end.value

    def feed(self, source, *messages, to=0):
        entries = tuple(Entry(source, to, message) for message in messages)
        self._advance((source, Bundle(entries)))

    def answer(self, *entries, server=0, num_taken=1):
        bundle = Bundle(tuple(Entry(server, to, message) for to, message in entries), num_taken)
        self._advance((server, bundle))

    def take(self):
        out, self.out = self.out, []
        return out


def push(value, version=0, **fields):
    payload = FixedBuffer(3, torch.float32)
    payload.body.fill_(value)
    return Push(version, 0, 4, payload, **{"share": 4.0} | fields)


def values(entries):
    return [
        (e.source, None if e.message.payload is NOT_SENT else e.message.payload.body.tolist())
        for e in entries
    ]


def test_a_push_waits_for_all_that_were_answered_and_for_nobody_else():
    desk = Desk()
    desk.feed(2, Join(0))
    desk.feed(3, Join(0))
    assert [to for to, _ in desk.take()] == [0]  # the second waits until the server has dealt with the first
    desk.answer((2, Reply(0, 0)), num_taken=0)
    assert [to for to, _ in desk.take()] == [2]
    desk.answer()
    assert [(to, [e.source for e in entries]) for to, entries in desk.take()] == [(0, [3])]
    desk.feed(2, push(1.0))
    desk.feed(3, push(2.0))
    assert desk.take() == []  # the third has not joined, and will push
    desk.feed(4, Join(0), Idle(0))
    desk.answer()
    ((to, entries),) = desk.take()
    assert to == 0 and values(entries[2:]) == [(2, [3.0] * 3), (3, None)]
    desk.answer((2, Reply(1, 1)), (3, Reply(1, 1, stop=True)))
    assert [to for to, _ in desk.take()] == [2, 3]
    desk.feed(2, push(7.0, 1))  # one that is to stop is not waited for
    assert values(desk.take()[0][1]) == [(2, [7.0] * 3)]


def test_a_sum_is_of_what_counts_in_the_order_of_ranks():
    desk = Desk()
    desk.feed(4, push(1.0, share=2.0))
    desk.feed(2, push(5.0, share=0.0))
    desk.feed(3, push(float("nan"), finite=False))
    ((_, entries),) = desk.take()
    assert values(entries) == [(2, None), (3, None), (4, [1.0] * 3)]
    assert [entry.message.finite for entry in entries] == [True, False, True]
    desk = Desk()
    for worker, value, share in ((4, 1.0, 2.0), (3, 10.0, 1.0), (2, 100.0, 4.0)):
        desk.feed(worker, push(value, share=share))
    ((_, entries),) = desk.take()
    assert values(entries) == [(2, [100.0 + 10.0 / 4 + 1.0 / 2] * 3), (3, None), (4, None)]
    desk = Desk()
    for worker in (2, 3, 4):
        desk.feed(worker, push(float("inf"), finite=False))
    assert [payload for _, payload in values(desk.take()[0][1])] == [None] * 3


def test_one_that_is_asked_to_end_asks_the_dealing_server_with_the_next_pushes():
    desk = Desk(servers=(0, 1), members=(2, 3))
    for server in (0, 1):
        desk.feed(2, push(1.0, checkpoint=CheckpointRequest(40)), to=server)
    desk.aggregator.asked = lambda: True
    for server in (0, 1):
        desk.feed(3, push(1.0, checkpoint=CheckpointRequest(40)), to=server)
    asked = {to: [entry.message.checkpoint.at for entry in entries] for to, entries in desk.take()}
    assert asked == {0: [40, None], 1: [40, 40]}


def test_it_ends_when_all_have_and_the_servers_have_everything():
    desk = Desk(sums=False, servers=(0, 1), members=(2, 3))
    desk.feed(2, Done(1))
    desk._advance((2, Bundle(())))
    desk.feed(3, Done(1))
    desk.feed(3, Done(1), to=1)
    desk._advance((3, Bundle(())))
    assert [to for to, _ in desk.take()] == [0, 1] and desk.ended is None
    payload = FixedBuffer(3, torch.float32)
    desk.answer((2, Reply(1, 1, payload=payload)))  # it has ended; the server did not know
    assert [(to, [e.source for e in entries]) for to, entries in desk.take()] == [(0, [3])]
    assert payload.users == 0 and desk.ended is None
    desk.answer(server=1)
    desk.answer()
    assert desk.ended == {"rank": 9, "bundles": 3, "pushes": 0, "sums": 0}


def test_a_message_that_is_in_no_bundle_is_out_of_turn():
    desk = Desk()
    with pytest.raises(WireError, match=r"rank 2 sent NOTE to rank 9 \(aggregator\)"):
        desk._advance((2, Note(json.dumps({}))))
