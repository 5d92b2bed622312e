"""Hooks on a job's optimizer act wherever its steps are taken: clipping, schedulers, whatever only looks."""

import copy
import json
import math

import pytest
import torch

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.model import Replica, flat_model, local_steps, server_steps, shard_store
from mpitrain.model.recipe import GradientRule
from mpitrain.model.replicas.worker_replica import Between
from mpitrain.reporting.report import NullReport
from mpitrain.roles import Duties, FaultTolerantServer, Rhythm, Worker
from mpitrain.strategies.placement import assign
from mpitrain.strategies.sampling.dealer import BatchDealer
from mpitrain.training.measure import build
from mpitrain.virtual import Constant, Ideal, VirtualWorld
from tests import toy
from tests.virtual.test_worker_side import close, run, same, trained
from tests.virtual.worlds import paced


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_one_worker_with_hooks_is_serial_training_bit_for_bit(tmp_path, servers):
    job = toy.make_job(optimizer=toy.hooked)
    expected = toy.serial(job)
    assert not same(expected, toy.serial(toy.make_job(optimizer=without_hooks)))  # they do something
    assert same(trained(tmp_path, job, mt.Async(servers=servers)), expected)
    assert close(trained(tmp_path, job, mt.Async(servers=servers, optimizer="worker")), expected)


def without_hooks(parameters):
    optimizer = toy.hooked(parameters)
    optimizer._optimizer_step_pre_hooks.clear()
    optimizer._optimizer_step_post_hooks.clear()
    return optimizer


@pytest.mark.parametrize(
    "strategy", [mt.Sync(), mt.Async(), mt.Async(push_every=2), mt.Elastic(push_every=2)]
)
def test_hooks_run_once_a_batch_on_its_own_worker(tmp_path, strategy):
    """Before the step there is a gradient, and after it the parameters have moved, or are read anew."""
    seen = []

    def optimizer(parameters):
        parameters = list(parameters)
        made = torch.optim.SGD(parameters, lr=0.05)
        made.register_step_pre_hook(
            lambda one, *_: seen.append(("before", id(one), parameters[0].grad.norm() > 0))
        )
        made.register_step_post_hook(lambda one, *_: seen.append(("after", id(one), True)))
        return made

    run(tmp_path, toy.make_job(optimizer=optimizer), strategy, workers=2)
    for when in ("before", "after"):
        calls = [one for kind, one, fine in seen if kind == when and fine]
        assert len(calls) == 16 and sorted(map(calls.count, set(calls))) == [8, 8]


def test_a_hook_that_moves_parameters_ends_the_run(tmp_path):
    def optimizer(parameters):
        parameters = list(parameters)
        made = torch.optim.SGD(parameters, lr=0.05)
        made.register_step_post_hook(lambda *_: [p.data.mul_(0.5) for p in parameters])
        return made

    with pytest.raises(UsageError, match='changes parameters on a worker.*optimizer="worker"'):
        run(tmp_path, toy.make_job(optimizer=optimizer), mt.Async())
    run(tmp_path, toy.make_job(optimizer=optimizer), mt.Async(optimizer="worker"))


class Kept:
    """Checkpoints in memory, every twelve samples: of each part what its role and whatever else it has say."""

    writes_last = False

    def __init__(self, disk, part, more, writers=()):
        self.disk, self.part, self.more, self.writers = disk, part, more, writers

    def next_checkpoint_at(self, samples):
        return samples // 12 * 12 + 12

    def asked(self):
        return False

    def try_out(self, role_state):
        pass

    def save(self, mark, role_state, parts):
        state = {"role": json.loads(json.dumps(role_state)), "more": self.more()}
        self.disk.setdefault(mark, {})[self.part] = copy.deepcopy(state)


def served(job, strategy, parts=None):
    """One worker; `parts`: of the checkpoint to go on from. The final model, all checkpoints, and the last rates."""
    module, optimizer = build(job, None, torch.device("cpu"))
    model, disk, final = flat_model(module, optimizer, strategy), {}, {}
    roles = assign((0,) * (strategy.servers + 1), strategy.servers)
    world, processes = VirtualWorld(Constant(), Ideal(), 0, roles.workers, roles.workers), {}
    for shard in roles.servers:
        store = shard_store(model, shard, optimizer, strategy)
        dealer = (
            BatchDealer(job.data.num_samples, job.epochs, job.batch_size) if shard == roles.dealer else None
        )
        server = FaultTolerantServer(
            strategy, store, roles.workers, NullReport(), dealer, "stop", paced(job.data.num_samples, job.batch_size),
            Kept(disk, f"shard-{shard}", store.state, roles.workers), delivers=True, floor_s=math.inf,
        )  # fmt: skip
        if parts:
            store.restore(parts[f"shard-{shard}"]["more"])
            server.restore(parts[f"shard-{shard}"]["role"])
        processes[shard] = server.run()
    reader, (rank,) = job.data.reader(None, job.seed), roles.workers
    steps = server_steps(model, optimizer, strategy)
    between = Between(local_steps(model, optimizer, strategy), server_steps=steps)
    rule = GradientRule(job.loss, job.seed)
    replica = Replica(model, rule, toy.leases(reader), 0, between, shared=True)

    def deliver():
        final.update({name: value.clone() for name, value in replica.take_module().state_dict().items()})
        return {}

    worker = Worker(
        rank, roles, replica, NullReport(), Rhythm.of(strategy, wants_final=True),
        Duties(Kept(disk, "worker-0", replica.state), deliver),
    )  # fmt: skip
    if parts:
        worker.restore(parts["worker-0"]["role"])
        replica.restore(parts["worker-0"]["more"])
    processes[rank] = worker.run()
    world.run(processes)
    replica.finish()
    return final, disk, [group["lr"] for group in steps.hooks.optimizer.param_groups]


@pytest.mark.parametrize(
    "strategy", [mt.Sync(), mt.Async(servers=2), mt.Async(push_every=2), mt.Async(inflight=2)], ids=str
)
def test_who_goes_on_from_a_checkpoint_has_run_the_hooks_of_every_step_once(strategy):
    """A scheduler in a hook after the step is where it is without the interruption."""
    job = toy.make_job(optimizer=plain_hooked if strategy.moves else toy.hooked, batch_size=4)
    whole, disk, rates = served(job, strategy)
    assert strategy.moves or strategy.inflight == 2 or same(whole, toy.serial(job))
    complete = [parts for parts in disk.values() if len(parts) == strategy.servers + 1]
    assert len(complete) > 3
    for parts in complete[1:-1:3]:
        again, _, rates_again = served(job, strategy, parts)
        assert rates_again == rates
        assert strategy.inflight == 2 or same(again, whole)  # which reads anew


def plain_hooked(parameters):
    """Without momentum, so that several steps are one update."""
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer
