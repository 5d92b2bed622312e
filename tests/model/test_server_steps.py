"""What users attach to an optimizer whose steps servers take: options, hooks, state; the same bits as torch."""

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from mpitrain.errors import UsageError
from mpitrain.model import FlatModel, ShardStore, check_optimizer, local_steps, server_steps, shard_store
from mpitrain.model.optimizers.group_options import mean_option
from mpitrain.model.optimizers.step_hooks import StepHooks, check_whole
from mpitrain.strategies import Async
from tests.model.test_shard import OPTIMIZERS, in_two_groups, make_model


def served(optimizer, module, num_shards):
    """The flat model, its stores and what stays on the worker."""
    strategy = Async(servers=num_shards)
    flat = FlatModel(module, optimizer, num_shards)
    stores = [shard_store(flat, shard, optimizer, strategy) for shard in range(num_shards)]
    return flat, stores, server_steps(flat, optimizer, strategy)


def draw(step, *modules):
    torch.manual_seed(step)
    for parameters in zip(*(module.parameters() for module in modules), strict=True):
        gradient = torch.randn_like(parameters[0])
        for parameter in parameters:
            parameter.grad = gradient.clone()


def step(flat, stores, steps, *times):
    """One update on the servers: the gradients at hand, once for each worker."""
    wire_buffers = [flat.push_buffers() for _ in times or (0,)]
    text = steps.text()
    for worker, own in enumerate(wire_buffers):
        assert flat.gather_gradients(own)
        for store, wire_buffer in zip(stores, own, strict=True):
            if text:
                store.hear_options(text)
            store.add(worker, wire_buffer, 1.0)
    for shard, store in enumerate(stores):
        store.apply()
        flat.install(shard, store.live)


def change(optimizer, number):
    """Whatever schedulers, and people, change of a group."""
    for index, group in enumerate(optimizer.param_groups):
        factor = (0.5, 3.0, 0.0, 1.0)[number] if index else 1.0 + 0.25 * number
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(0.01 * factor)
        else:
            group["lr"] = 0.01 * factor
        for key, values in (("momentum", (0.5, 0.9, 0.0, 0.95)), ("weight_decay", (0.1, 0.0, 0.01, 0.2))):
            if key in group and not (key == "momentum" and group.get("nesterov")):
                group[key] = values[number]
        if "betas" in group:
            group["betas"] = ((0.9, 0.99), (0.95, 0.99), (0.5, 0.999), (0.9, 0.99))[number]


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"fused"}))
@pytest.mark.parametrize("num_shards", [1, 3])
def test_changed_options_reach_every_shard_bit_for_bit(name, num_shards):
    reference, module = make_model(), make_model()
    optimizer, prototype = OPTIMIZERS[name](reference), OPTIMIZERS[name](module)
    flat, stores, steps = served(prototype, module, num_shards)
    for number in range(4):
        draw(number, reference, module)
        change(optimizer, number)
        change(prototype, number)
        optimizer.step()
        step(flat, stores, steps)
        for theirs, ours in zip(reference.parameters(), module.parameters(), strict=True):
            assert torch.equal(theirs, ours), (number, theirs.shape)


def test_nothing_is_said_before_something_has_changed_and_everything_after():
    module = make_model()
    optimizer = in_two_groups(torch.optim.SGD, module, momentum=0.9)
    _, _, steps = served(optimizer, module, 1)
    assert steps.text() == ""
    torch.optim.lr_scheduler.StepLR(optimizer, 5)  # adds an option of its own, which no server needs
    assert steps.text() == ""
    optimizer.param_groups[1]["lr"] = 0.5
    assert steps.text() == '{"1": {"lr": 0.5}}'
    optimizer.param_groups[1]["lr"] = 0.004
    assert steps.text() == "{}"  # back where it began: the servers have to be told


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"fused"}))
def test_state_from_before_goes_along(name):
    reference, module = make_model(), make_model()
    optimizer, prototype = OPTIMIZERS[name](reference), OPTIMIZERS[name](module)
    for number in range(2):
        draw(number, reference, module)
        optimizer.step()
        prototype.step()
    flat, stores, steps = served(prototype, module, 3)
    for number in range(2, 4):
        draw(number, reference, module)
        optimizer.step()
        step(flat, stores, steps)
        for theirs, ours in zip(reference.parameters(), module.parameters(), strict=True):
            assert torch.equal(theirs, ours), (number, theirs.shape)


def test_state_of_some_parameters_only_is_refused():
    module = make_model()
    optimizer = torch.optim.Adam(module.parameters())
    module.p0.grad = torch.ones_like(module.p0)
    optimizer.step()
    with pytest.raises(UsageError, match="remembers different things"):
        served(optimizer, module, 1)


def test_an_update_of_several_gradients_takes_the_mean_of_their_options():
    """With SGD the mean gradient at the mean rate; one of one gradient takes its own, whoever pushed before."""
    module = make_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    flat = FlatModel(module, optimizer, 1)
    store = ShardStore(flat.layout, 0, flat.wire_buffers[0].body, optimizer)

    def update(*texts):
        before = store.live.body.clone()
        for text in texts:
            (wire_buffer,) = flat.push_buffers()
            wire_buffer.body.fill_(2.0)
            if text:
                store.hear_options(text)
            store.add(0, wire_buffer, 1.0)
        store.apply()
        return float((before - store.live.body).double().mean())

    assert update("") == pytest.approx(2.0)
    assert update('{"0": {"lr": 0.5}}') == pytest.approx(1.0)
    assert update("") == pytest.approx(2.0)  # of a worker that has changed nothing
    assert update('{"0": {"lr": 0.5}}', "", '{"0": {"lr": 0.0}}') == pytest.approx(2.0 * 0.5)
    assert mean_option("lr", [0.1, 0.1, 0.1]) == 0.1  # to the bit
    assert mean_option("betas", [[0.5, 0.9], [1.0, 0.9]]) == [0.75, 0.9]
    with pytest.raises(UsageError, match="different values of the option nesterov"):
        mean_option("nesterov", [True, False])


def clamp(optimizer, arguments, named):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.data.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_that_changes_parameters_is_refused_by_name(when):
    module = make_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    hooks = StepHooks(optimizer, list(module.parameters()))
    assert not hooks
    seen = []
    register = optimizer.register_step_pre_hook if when == "before" else optimizer.register_step_post_hook
    register(lambda *arguments: seen.append(arguments))
    getattr(hooks, when)()
    assert hooks and seen == [(optimizer, (optimizer,), {})]
    if when == "before":
        with pytest.raises(UsageError, match="one stage alone under pipeline"):
            check_whole(optimizer, "pipeline(stages=2)")
    register(clamp)
    with pytest.raises(UsageError, match=r'clamp\) changes parameters .*optimizer="worker"'):
        getattr(hooks, when)()


def test_what_only_a_whole_step_on_the_worker_can_do_is_refused():
    module = make_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 5)  # replaces the step too, to count calls
    check_optimizer(optimizer, Async())
    optimizer.step = lambda closure=None: None
    with pytest.raises(UsageError, match='replaced on the instance.*optimizer="worker"'):
        check_optimizer(optimizer, Async())
    check_optimizer(optimizer, Async(optimizer="worker"))
    with pytest.raises(UsageError, match="LBFGS evaluates the loss several times a step"):
        check_optimizer(torch.optim.LBFGS(module.parameters()), Async(optimizer="worker"))


def test_a_server_runs_no_hooks():
    seen = []
    handle = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    try:
        module = make_model()
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        flat, stores, steps = served(optimizer, module, 2)
        draw(0, module)
        step(flat, stores, steps)
        assert seen == []
        optimizer.step()
        assert seen == [1]
    finally:
        handle.remove()


def test_pushes_of_several_batches_carry_what_each_was_worth():
    """Between two reads the worker moves at the rates of the day; the server's plain SGD ends where it did."""
    module = make_model(torch.float64)
    optimizer = in_two_groups(torch.optim.SGD, module)
    strategy = Async(push_every=4)
    flat = FlatModel(module, optimizer, 1)
    store = shard_store(flat, 0, optimizer, strategy)
    local, steps = local_steps(flat, optimizer, strategy), server_steps(flat, optimizer, strategy)
    for first in (0, 1, 2, 3):  # the first batch of a push at a rate of 0, too
        for number in range(4):
            draw(number, module)
            for group, rates in zip(
                optimizer.param_groups, ((0.5, 3.0, 0.0, 1.0), (0.0, 0.1, 0.2, 0.3)), strict=True
            ):
                group["lr"] = rates[(first + number) % 4]
            assert local.step()
        expected = flat.current()[0].body.clone()
        store.hear_options(steps.text(local.rates))
        store.add(0, local.take_push()[0], 1.0)
        store.apply()
        torch.testing.assert_close(store.live.body, expected, rtol=1e-12, atol=1e-12)
        flat.install(0, store.live)


@pytest.mark.parametrize("strategy", [Async(optimizer="worker"), Async(push_every=2)], ids=str)
def test_a_step_without_any_gradient_moves_nothing_as_in_torch(strategy):
    """A loop that has left a batch out."""
    module = make_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    flat = FlatModel(module, optimizer, 1)
    local = local_steps(flat, optimizer, strategy)
    assert local.step()
    (wire_buffer,) = local.take_push()
    assert not wire_buffer.body.any()
    for theirs, ours in zip(make_model().parameters(), module.parameters(), strict=True):
        assert torch.equal(theirs, ours)
