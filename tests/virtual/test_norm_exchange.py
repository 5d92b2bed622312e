"""Servers that exchange the norms of their parts, in virtual time; `test_exactly_once.py` kills, stops and restarts
them."""

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.effects import Compute, Now, Recv, Send
from mpitrain.inject import Kill
from mpitrain.messages import Alive, Done, Ended, Join, Lease, Lost, Ordered, PartialNorm, Push, Reply
from mpitrain.reporting.report import NullReport
from mpitrain.roles import ClippingServer
from mpitrain.strategies import Backup, Sync
from mpitrain.strategies.sampling.dealer import BatchDealer
from mpitrain.virtual import Exponential
from tests import toy
from tests.virtual.worlds import Number, NumberStore, paced


def float64():
    return toy.smooth().double()


@pytest.mark.parametrize("optimizer", [toy.sgd, toy.adam, toy.two_groups])
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_the_number_of_servers_does_not_matter(tmp_path, servers, optimizer):
    """The last round of an epoch is an incomplete one."""
    changes = {
        "model": float64,
        "loss": toy.square_loss_float64,
        "data": toy.Memory(52),
        "optimizer": optimizer,
    }
    job = toy.make_job(**changes, clip_norm=0.3, batch_size=4)
    expected = toy.serial(toy.make_job(**changes, clip_norm=0.3, batch_size=12))
    for rule in (Sync(servers=servers), Backup(spare=0, servers=servers)):
        result = mt.simulate(
            job, rule, 3, run_dir=str(tmp_path / str(rule)), quiet=True, compute=Exponential()
        )
        found = load_file(result["model"])
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", [Sync(servers=3), Backup(servers=2), Backup(spare=2, servers=3)], ids=str)
@pytest.mark.parametrize("worker", [0, 3])
def test_a_run_goes_on_without_a_worker_that_dies(tmp_path, rule, worker):
    job = toy.make_job(epochs=4, clip_norm=0.1, batch_size=4)
    result = mt.simulate(
        job, rule, 4, run_dir=str(tmp_path), quiet=True, compute=Exponential(), inject=str(Kill(worker, 3))
    )
    assert (result["status"], list(result["lost"].values())) == ("ok", ["died"])
    assert result["samples"] + result["samples_dropped"] == 4 * 48
    versions = [shard["version"] for shard in result["shards"]]
    assert len(set(versions)) == 1


class NormStore(NumberStore):
    """Notes the norms that its updates were clipped by."""

    def __init__(self):
        super().__init__(0.5)
        self.norms = []

    def mean_squares(self):
        return (self._total / self._shares) ** 2

    def apply(self, norm=None):
        self.norms.append(norm)
        super().apply()


class Desk:
    """A server fed by hand, rank 0 or 1 of two, with the workers 2 and 3; `sent`: (to whom, what)."""

    def __init__(self, rank):
        self.store, self.sent = NormStore(), []
        dealer = BatchDealer(1 << 20, 1, 1) if rank == 0 else None
        self.server = ClippingServer(
            Sync(servers=2), self.store, (2, 3), NullReport(), dealer, pace=paced(1 << 20, 1),
            others=[1 - rank],
        )  # fmt: skip
        self._role = self.server.run()
        self._go_on(None)

    def feed(self, *arrived):
        for source, message in arrived:
            self._go_on((source, message))

    def _go_on(self, answer):
        effect = self._role.send(answer)
        while not isinstance(effect, Recv):
            answer = (
                effect.task() if isinstance(effect, Compute) else 0.0 if isinstance(effect, Now) else None
            )
            if isinstance(effect, Send):
                self.sent.append((effect.to, effect.message))
            effect = self._role.send(answer)

    def take_sent(self, kind):
        taken, self.sent = [one for one in self.sent if isinstance(one[1], kind)], []
        return taken


def push(worker, value=3.0, step=0):
    return worker, Push(step, step, 1, Number(value, step), lease=Lease(0, 2 * step + worker - 2, 1))


def test_a_server_that_waits_for_the_others_answers_signs_of_life_and_puts_off_the_rest():
    desk = Desk(0)
    desk.feed((2, Join(0)), (3, Join(0)), push(2), push(3))
    assert desk.take_sent(PartialNorm) == [(1, PartialNorm(1, 9.0))]
    desk.feed((3, Alive()))
    assert desk.take_sent(object) == [(3, Alive())] and desk.store.norms == []
    desk.feed((1, PartialNorm(1, 16.0)))
    assert desk.store.norms == [5.0]
    assert {to for to, _ in desk.take_sent(Reply)} == {2, 3}


def test_nobody_waits_for_a_server_that_has_ended():
    desk = Desk(0)
    desk.feed((2, Join(0)), (3, Join(0)), push(2), (1, Ended()), push(3))
    assert desk.store.norms == [3.0]
    desk.feed(push(2, 4.0, 1), push(3, 4.0, 1))
    assert desk.store.norms == [3.0, 4.0]


def test_the_others_take_up_messages_in_the_order_of_the_dealing_server():
    desk = Desk(1)
    desk.feed((2, Join(0)), (3, Join(0)))
    assert desk.sent == []
    desk.feed((0, Ordered(3)), (0, Ordered(2)))
    assert [to for to, _ in desk.take_sent(Reply)] == [3, 2]
    desk.feed((0, Ordered(2)), (0, Ordered(3)), push(3))
    assert desk.server.gathering.empty
    desk.feed(push(2), (0, PartialNorm(1, 16.0)))
    assert desk.store.norms == [5.0]


def test_a_server_makes_the_dealing_ones_update_without_a_push_that_never_came():
    desk = Desk(1)
    desk.feed((2, Join(0)), (3, Join(0)), (0, Ordered(2)), (0, Ordered(3)), (0, Ordered(2)), push(2))
    desk.feed((0, Ordered(3)), (0, PartialNorm(1, 16.0)), (3, Lost()))
    assert desk.store.norms == [5.0] and desk.server.counts.version == 1
    desk.feed((0, Ordered(2)), (2, Done(1)), (0, Ordered(3, "died")))
    assert desk.server.table.lost == {3: "died"}
