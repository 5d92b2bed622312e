"""Who holds a wire buffer: a worker's replica gives back what it was answered, and what it computed in vain."""

import pytest
import torch

import mpitrain as mt
from mpitrain.messages.common import Lease
from mpitrain.model.factory import flat_model
from mpitrain.model.recipe import GradientRule
from mpitrain.model.replicas.worker_replica import Replica
from mpitrain.model.wire.buffers import FixedBuffer
from mpitrain.training.measure import build
from tests import toy


def replica_of(shared: bool, **job):
    job = toy.make_job(batch_size=4, **job)
    module, optimizer = build(job, None, torch.device("cpu"))
    model, reader = flat_model(module, optimizer, mt.Async(servers=2)), job.data.reader(None, job.seed)
    return Replica(model, GradientRule(job.loss, job.seed), toy.leases(reader), 0, shared=shared)


def payload_of(replica, shard, value):
    payload = FixedBuffer(replica.model.layout.size(shard), replica.model.layout.dtype)
    payload.body.fill_(value)
    return payload


@pytest.mark.parametrize("shared", [False, True])
def test_parameters_and_differences_are_given_back_once_they_are_taken_over(shared):
    replica, seen = replica_of(shared), []
    for value in (1.0, 2.0):
        seen.append([payload_of(replica, shard, value) for shard in range(2)])
        for shard, payload in enumerate(seen[-1]):
            replica.load(shard, payload)
    assert [payload.users for payload in seen[0]] == [0, 0]
    assert [payload.users for payload in seen[1]] == ([1, 1] if shared else [0, 0])  # in use as they are
    differences = [payload_of(replica, shard, 0.5) for shard in range(2)]
    for shard, payload in enumerate(differences):
        replica.subtract(shard, payload)
    assert [payload.users for payload in differences] == [0, 0]
    parameters = replica.take_module().parameters()
    assert all(bool((parameter == 1.5).all()) for parameter in parameters)


def test_a_gradient_that_was_broken_off_before_it_was_pushed_is_given_back():
    replica = replica_of(False)
    for shard in range(2):
        replica.load(shard, payload_of(replica, shard, 0.01))
    replica.gradient(Lease(0, 0, 4), 0)
    first = list(replica._wire_buffers)
    replica.gradient(Lease(0, 0, 4), 1)
    assert [buffer.users for buffer in first] == [0, 0] or all(
        buffer.users == 1 and buffer in replica._wire_buffers for buffer in first
    )
    pushed = replica.take_push()
    assert [buffer.users for buffer in pushed] == [1, 1]
    with pytest.raises(AssertionError, match="push without a gradient"):
        replica.take_push()
