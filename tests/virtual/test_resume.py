"""Saved in mid-epoch and restored into new roles, a run goes on as if nothing had happened."""

import json

import torch

from mpitrain.effects import Compute, Send
from mpitrain.model import FlatModel, Replica, ShardStore
from mpitrain.model.recipe import GradientRule
from mpitrain.reporting.report import NullReport
from mpitrain.roles import Rhythm, Server, Worker
from mpitrain.strategies import Async
from mpitrain.strategies.placement import assign
from mpitrain.strategies.sampling.dealer import BatchDealer
from mpitrain.training.measure import build
from mpitrain.virtual import Constant, Ideal, VirtualWorld
from tests import toy

ROLES = assign((0, 0, 0), 2)


class Interrupted(Exception):
    pass


class Run:
    """Two servers and one worker; stops by exception after a number of gradients."""

    def __init__(self, job):
        module, optimizer = build(job, None, torch.device("cpu"))
        model, reader = FlatModel(module, optimizer, 2), job.data.reader(None, 0)
        self.stores = [
            ShardStore(model.layout, shard, model.wire_buffers[shard].body, optimizer) for shard in (0, 1)
        ]
        dealer = BatchDealer(job.data.num_samples, job.epochs, job.batch_size)
        self.servers = [
            Server(
                Async(servers=2),
                self.stores[shard],
                ROLES.workers,
                NullReport(),
                dealer if shard == 0 else None,
            )
            for shard in (0, 1)
        ]
        self.replica = Replica(model, GradientRule(job.loss), toy.leases(reader), 2, shared=True)
        self.worker = Worker(2, ROLES, self.replica, NullReport(), Rhythm(wants_final=True))

    def go(self, num_gradients=10**9):
        world = VirtualWorld(Constant(), Ideal())
        roles = {rank: server.run() for rank, server in enumerate(self.servers)}
        try:
            world.run(roles | {2: interrupt(self.worker.run(), num_gradients)})
        except Interrupted:
            return self
        return {name: tensor.clone() for name, tensor in self.replica.take_module().state_dict().items()}

    def state(self):
        roles = [json.loads(json.dumps(server.state())) for server in self.servers]
        return roles, [store.state() for store in self.stores], json.loads(json.dumps(self.worker.state()))

    def restore(self, state):
        for server, store, saved, tensors in zip(self.servers, self.stores, state[0], state[1], strict=True):
            server.restore(saved)
            store.restore(tensors)
        self.worker.restore(state[2])
        return self


def interrupt(role, num_gradients):
    """Run a role, and raise when it has computed so many gradients and been answered."""
    answer, effect = None, None
    while True:
        try:
            effect = role.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(effect, Compute) and effect.what == "gradient":
            if num_gradients == 0:
                raise Interrupted
            num_gradients -= 1
        answer = yield effect
        assert not isinstance(effect, Send) or answer is None


def test_a_restored_run_is_the_uninterrupted_one_bit_for_bit():
    for optimizer in (toy.sgd, toy.adam):
        job = toy.make_job(optimizer=optimizer, epochs=3, batch_size=5)
        whole = Run(job).go()
        for cut in (1, 9, 10, 17, 29):
            resumed = Run(job).restore(Run(job).go(cut).state())
            trained = resumed.go()
            for name, tensor in whole.items():
                assert torch.equal(trained[name], tensor), (cut, name)
            for server in resumed.servers:
                left, right = server.counts.identity()
                assert left == right and server.counts.accepted == 30
