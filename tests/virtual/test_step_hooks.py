"""Hooks on a job's optimizer act wherever its steps are taken: clipping, schedulers, whatever only looks."""

import pytest
import torch

import mpitrain as mt
from mpitrain.errors import UsageError
from tests import toy
from tests.virtual.test_worker_side import close, run, same, trained


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
