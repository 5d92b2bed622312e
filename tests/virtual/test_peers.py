"""Peers in virtual time: laws of consensus, replicas that agree to the bit, and nobody who waits without need."""

import itertools
import json
import math
from collections import Counter

import pytest
import torch
from torch import nn

from mpitrain import Decentralized, EightBit, Threshold, TopK, Warmup, simulate
from mpitrain.checkpoint import Checkpoint
from mpitrain.checkpoint.parts import write_part
from mpitrain.effects import Recv, Send, watched
from mpitrain.errors import LostRankError, NonFiniteError, UsageError
from mpitrain.messages import Update
from mpitrain.model.replicas.peer_replica import PeerReplica
from mpitrain.model.wire.flat import FlatModel
from mpitrain.reporting.report import NullReport
from mpitrain.roles.peer import Peer
from mpitrain.roles.peer_credits import CREDITS
from mpitrain.strategies.sampling.peer_partition import Endless, PeerPartition
from mpitrain.system.files.run_directory import Identity
from mpitrain.training.decentralized.checkpoints import restore
from mpitrain.training.measure import build
from mpitrain.virtual import Constant, Ideal, VirtualWorld
from mpitrain.virtual.network import NetworkLaw
from tests import toy

SMALL = Threshold(density=0.2, tau=2.0**-6, adaptive=False, dense_below=0)


def run_virtually(tmp_path, strategy, workers, name="run", compute=None, **changes):
    options = {key: changes.pop(key) for key in ("steps", "inject") if key in changes}
    job = toy.make_job(**changes)
    law = {} if compute is None else {"compute": compute}
    return simulate(
        job, strategy, workers=workers, run_dir=str(tmp_path / name), quiet=True, **law, **options
    )


def half_square(model, batch):
    """w^2/2 for the one weight of `vector`, whatever the batch."""
    return model.weight.square().sum() / 2


def walk(strategy, starts, num_steps, rate=0.0):
    """Peers that start from the rows of `starts`, on |w|^2/2: (what each returned, the mean at the end)."""
    number, size = starts.shape
    module = nn.Linear(size, 1, bias=False, dtype=starts.dtype)
    optimizers = [torch.optim.SGD(module.parameters(), lr=rate) for _ in range(number)]
    model = FlatModel(module, optimizers[0], 1)
    reader = toy.Memory(number).reader(None, 0)
    replicas = [
        PeerReplica(model, optimizers[rank], strategy, rank, toy.recipe(half_square, number), toy.leases(reader),
                    shared=True)
        for rank in range(number)
    ]  # fmt: skip
    for replica, start in zip(replicas, starts, strict=True):
        replica.x.copy_(start)
    peers = [
        Peer(
            rank,
            number,
            strategy,
            PeerPartition(number, 1, 1, number, rank, num_steps),
            replicas[rank],
            NullReport(),
        )
        for rank in range(number)
    ]
    returned = VirtualWorld(Constant(1.0, 0.0), Ideal()).run({p.rank: p.run() for p in peers})
    return [returned[rank] for rank in range(number)], replicas[0].x.clone()


@pytest.mark.parametrize("number", [3, 5, 8])
def test_disagreement_on_a_quadratic_shrinks_by_the_spectral_rate_of_the_ring(number):
    wave = torch.cos(2 * math.pi * torch.arange(number, dtype=torch.float64) / number)
    rate = (1 + 2 * math.cos(2 * math.pi / number)) / 3
    returned, _ = walk(Decentralized("ring"), 1 + wave[:, None], 10, rate=0.05)
    for one, height in zip(returned, wave.abs().tolist(), strict=True):
        assert one["drift"] == pytest.approx(rate**10 * height, rel=1e-9, abs=1e-14)


EIGHT, FIFTH = EightBit(dense_below=0), TopK(density=0.2, dense_below=0)


@pytest.mark.parametrize(
    ("topology", "codec", "gamma"),
    [("ring", FIFTH, 0.2), ("ring", EIGHT, 1.0), ("torus", EIGHT, 1.0), ("exponential", EIGHT, 1.0)],
)
def test_compressed_gossip_keeps_the_mean_and_comes_to_agree(topology, codec, gamma):
    starts = torch.randn(8, 60, generator=torch.Generator().manual_seed(2))
    returned, mean = walk(Decentralized(topology, codec=codec, gamma=gamma), starts, 100)
    torch.testing.assert_close(mean, starts.mean(0), rtol=0, atol=2e-5)
    before = max(float((start - starts.mean(0)).norm() / starts.mean(0).norm()) for start in starts)
    assert max(one["drift"] for one in returned) < 0.05 * before


def test_sixty_four_peers_agree_exactly_after_six_steps_of_one_message_each(tmp_path):
    starts = torch.arange(64, dtype=torch.float64)[:, None]
    returned, mean = walk(Decentralized("exponential"), starts, 6)
    assert float(mean) == 31.5 and all(one["drift"] == 0.0 for one in returned)
    assert all(one["messages"] == 6 for one in returned)
    result = run_virtually(
        tmp_path, Decentralized("ring", asynchronous=True), 64, data=toy.Memory(192), epochs=2
    )
    assert result["accepted"] == 2 * 64 and result["samples"] == 2 * 192 and result["averagings"] == 1
    assert all(one["samples"] == 6 for one in result["ranks"])


@pytest.mark.parametrize("changes", toy.DYADIC.values(), ids=list(toy.DYADIC))
def test_full_topology_is_serial_training_on_the_whole_batch_bit_for_bit(tmp_path, changes):
    models = []
    for workers in (1, 2, 4):
        changes = changes | {"epochs": 1, "batch_size": 16 // workers}
        result = run_virtually(tmp_path, Decentralized(), workers, str(workers), **changes)
        models.append(result["ranks"][0]["digest"])
    assert len(set(models)) == 1


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_synchronous_full_topology_keeps_replicas_the_same_to_the_bit(tmp_path, workers):
    result = run_virtually(tmp_path, Decentralized(codec=SMALL), workers, batch_size=2)
    assert result["replicas_identical"] and len({one["digest"] for one in result["ranks"]}) == 1
    assert 0 < result["ranks"][0]["density"] < 1 and result["ranks"][0]["residual_norm"] > 0
    assert result["drift"] < 1e-7  # the mean of equal numbers, rounded
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    (told,) = [row for row in rows if row["event"] == "exchange"]
    assert (told["messages"], told["per"]) == (workers - 1, "step and rank") and told["before"] == str(SMALL)


def test_nobody_waits_for_a_paused_peer_where_asynchronous(tmp_path):
    second = Constant(1.0, jitter=0.0)
    for asynchronous, topology in [(False, "full"), (True, "full"), (True, "ring")]:
        result = run_virtually(
            tmp_path, Decentralized(topology, asynchronous=asynchronous), 4, compute=second, batch_size=1,
            inject=("pause(worker=1, at_step=2, seconds=6.5)",),
        )  # fmt: skip
        lead = result["ranks"][1]["max_steps_ahead"]
        assert lead == (6 if asynchronous else 0)
        assert result["virtual_s"] == result["steps"] + 6.5
        waited = [one["wait_s"] for one in result["ranks"] if one["rank"] != 1]
        assert all(wait == 6.5 for wait in waited)  # at the last meeting, or at once


@pytest.mark.parametrize("topology", ["full", "ring", "exponential"])
@pytest.mark.parametrize("resync", [0, 30])
def test_a_peer_a_hundred_times_slower_is_sent_a_bounded_number_of_updates(
    tmp_path, monkeypatch, topology, resync
):
    """Counted at the peers' own effects; every update is taken in, once."""
    under_way, most, whole = Counter(), Counter(), Peer.run

    def counted(peer):
        def before(effect):
            if isinstance(effect, Send) and isinstance(effect.message, Update):
                way = (peer.rank, effect.to)
                under_way[way] += 1
                most[way] = max(most[way], under_way[way])

        def after(effect, answer):
            if isinstance(effect, Recv) and answer is not None and isinstance(answer[1], Update):
                under_way[answer[0], peer.rank] -= 1

        return watched(whole(peer), before, after)

    monkeypatch.setattr(Peer, "run", counted)
    result = run_virtually(
        tmp_path, Decentralized(topology, asynchronous=True, resync=resync), 4, compute=Constant(1.0, jitter=0.0),
        batch_size=1, epochs=6, inject=("slow(worker=1, factor=100)",),
    )  # fmt: skip
    assert max(most.values()) == CREDITS and not any(under_way.values())
    assert max(one["max_unanswered"] for one in result["ranks"]) == CREDITS
    assert result["accepted"] == 4 * result["steps"] == 288
    if topology == "full":
        assert result["drift_max"] < 1e-5


def test_meetings_end_what_has_come_apart(tmp_path):
    result = run_virtually(tmp_path, Decentralized("ring", resync=3), 4, batch_size=2)
    assert result["steps"] == 12 and result["averagings"] == 12 // 3 + 1
    assert result["drift_max"] > 1e-3 and result["drift"] < 1e-6  # nothing happened since the one before


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("topology", ["full", "ring", "exponential"])
def test_few_peers_warm_up_and_the_others_join_from_them(tmp_path, topology, asynchronous):
    rule = Decentralized(topology, asynchronous=asynchronous, warmup=Warmup(2, epochs=1), codec=EightBit())
    result = run_virtually(tmp_path, rule, 5, batch_size=2)
    assert [one["batches"] for one in result["ranks"]] == [12 + 5] * 2 + [5] * 3  # 48 = 12 x 4 = 4 x 10 + 8
    assert result["averagings"] == 2 and result["accepted"] == 2 * 12 + 5 * 5
    assert sum(one["samples"] for one in result["ranks"]) == result["samples"] == 2 * 48


def test_a_gradient_that_is_not_finite_stops_or_is_skipped(tmp_path):
    def loss(model, batch):
        value = toy.square_loss(model, batch)
        return value * float("nan") if float(batch["x"][0, 0]) > 0.9 else value

    with pytest.raises(NonFiniteError, match=r"rank \d \(peer, step \d"):
        run_virtually(tmp_path, Decentralized(), 3, loss=loss, batch_size=1)
    for topology in ("full", "ring"):
        result = run_virtually(
            tmp_path, Decentralized(topology), 3, topology, loss=loss, batch_size=1, on_nonfinite="skip"
        )
        assert result["nonfinite"] > 0 and result["accepted"] + result["nonfinite"] == 3 * result["steps"]
        assert result["status"] == "ok" and math.isfinite(result["drift"])


def test_a_codec_is_refused_for_parameters_that_are_not_float32(tmp_path):
    with pytest.raises(UsageError, match="float32"):
        run_virtually(tmp_path, Decentralized(codec=SMALL), 2, **toy.DYADIC["quadratic in float64"])


@pytest.mark.parametrize("topology", ["full", "ring"])
def test_a_restored_peer_goes_on_to_the_bit(topology):
    rule = Decentralized(topology, codec=SMALL)
    job = toy.make_job(optimizer=toy.adam)
    reader = job.data.reader(None, 0)

    def make():
        torch.manual_seed(0)
        module = job.model()
        optimizer = job.optimizer(module.parameters())
        model = FlatModel(module, optimizer, 1)
        replica = PeerReplica(model, optimizer, rule, 0, toy.recipe(job.loss), toy.leases(reader))
        return replica, Peer(0, 1, rule, PeerPartition(48, 2, 6, 1, 0), replica, NullReport())

    def go(peer, num_steps):
        peer.partition.num_steps = peer.partition.step + num_steps
        return VirtualWorld(Constant(1.0, 0.0), Ideal()).run({0: peer.run()})[0]["digest"]

    replica, peer = make()
    go(peer, 5)
    other, resumed = make()
    other.restore(replica.state())
    resumed.restore(peer.state())
    assert go(resumed, 4) == go(peer, 4)
    assert resumed.state() == peer.state()


@pytest.mark.parametrize("topology", ("full", "ring"))
def test_another_number_of_peers_goes_on_from_the_mean(tmp_path, topology):
    """What codecs had kept back is neither lost nor doubled: its mean over peers stays what it was."""
    strategy = Decentralized(topology, codec=TopK(density=0.1, dense_below=0))
    job = toy.make_job(model=toy.linear_float32, loss=toy.linear_loss)

    def make(number):
        made = []
        for rank in range(number):
            module, optimizer = build(job, None, torch.device("cpu"))
            reader = job.data.reader(None, 0)
            model = FlatModel(module, optimizer, 1)
            replica = PeerReplica(
                model, optimizer, strategy, rank, toy.recipe(job.loss, number), toy.leases(reader)
            )
            shares = PeerPartition(48, 2, 4, number, rank)
            made.append((Peer(rank, number, strategy, shares, replica, NullReport()), replica))
        return made

    def kept(replica):
        found = replica.encoder.state()["tensors"]
        sizes = {"residual/weight": 20, "residual/bias": 4}
        return torch.cat([found.get(name, torch.zeros(size)).reshape(-1) for name, size in sizes.items()])

    wrote = make(3)
    VirtualWorld(Constant(1.0), Ideal()).run({peer.rank: peer.run() for peer, _ in wrote})
    ours = Identity("run", "attempt")
    for peer, replica in wrote:
        name = f"own-{peer.rank}" if peer.rank else "shard-0"
        write_part(tmp_path, name, {"role": peer.state(), "replica": replica.state()}, ours)
    about = {"strategy": str(strategy)}
    resume = Checkpoint(tmp_path, 96, ("shard-0", "own-1", "own-2"), about, ours)
    mean = sum(replica.x for _, replica in wrote) / 3
    residual = sum(kept(replica) for _, replica in wrote) / 3
    for number in (2, 3, 5):
        again = make(number)
        for peer, replica in again:
            restore(resume, peer, replica)
            torch.testing.assert_close(replica.x, mean)
            assert peer.partition.samples == 96
        # peers that mix parameters keep nothing back: what is still to be sent is the difference to the copies
        keeps = topology == "full" or number == 3
        expected = residual if keeps else torch.zeros_like(residual)
        torch.testing.assert_close(sum(kept(replica) for _, replica in again) / number, expected)
    assert float(residual.abs().max()) > 0


class Loop:
    """A replica around somebody's own loop of so many steps."""

    def __init__(self, replica, num_steps):
        self._replica, self._left = replica, num_steps

    def __getattr__(self, name):
        return getattr(self._replica, name)

    def step(self, turn):
        if not self._left:
            return None
        self._left -= 1
        return self._replica.step(turn)


def run_loops(topology, asynchronous, counts, network=None, watch=lambda rank, role: role):
    """Loops of somebody's own around five peers, each of so many steps."""
    number, module = 5, nn.Linear(2, 1, bias=False)
    model = FlatModel(module, torch.optim.SGD(module.parameters(), lr=0.1), 1)
    reader, strategy = (
        toy.Memory(100).reader(None, 0),
        Decentralized(topology, asynchronous=asynchronous, resync=4),
    )

    def peer(rank, num_steps):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        replica = PeerReplica(model, optimizer, strategy, rank, toy.recipe(half_square, number), toy.leases(reader),
                              shared=True)  # fmt: skip
        return Peer(rank, number, strategy, Endless(number, rank), Loop(replica, num_steps), NullReport())

    peers = {rank: watch(rank, peer(rank, num_steps).run()) for rank, num_steps in enumerate(counts)}
    return VirtualWorld(Constant(1.0, 0.2), network or Ideal()).run(peers)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("topology", ["full", "ring", "exponential"])
def test_a_peer_that_leaves_its_loop_early_is_told_by_name(topology, asynchronous):
    """Whoever waits for it ends, at whatever step it leaves, also where the next thing is a meeting."""
    run_loops(topology, asynchronous, [8] * 5)  # all leave together
    for leaver, steps in ((0, 0), (3, 3), (2, 4), (4, 7)):
        told = rf"rank {leaver} has left the loop after {steps} step.*rank \d \(peer\)"
        with pytest.raises(LostRankError, match=told):
            run_loops(topology, asynchronous, [steps if rank == leaver else 8 for rank in range(5)])


class SlowBetween(NetworkLaw):
    """Messages from one rank to another take a second, all others no time."""

    def __init__(self, source, to):
        vars(self).update(source=source, to=to)

    def arrival_s(self, links, now_s, source, to, num_bytes):
        return now_s + ((source, to) == (self.source, self.to))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("topology", ["full", "ring", "exponential"])
def test_nothing_is_under_way_when_a_loop_is_over(topology, asynchronous):
    """A second loop in the same processes would take it for its own."""
    for slow in itertools.permutations(range(5), 2):
        sent, received = Counter(), Counter()

        def watch(rank, role, sent=sent, received=received):
            def before(effect):
                if isinstance(effect, Send):
                    sent[rank, effect.to] += 1

            def after(effect, answer):
                if isinstance(effect, Recv) and answer is not None:
                    received[answer[0], rank] += 1

            return watched(role, before, after)

        run_loops(topology, asynchronous, [4] * 5, SlowBetween(*slow), watch)
        assert sent == received
