"""A worker's own step in slices: torch's bits, nothing as large as a tensor made meanwhile, and hooks as ever."""

import warnings

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from mpitrain.model.optimizers.sliced_step import SlicedStep
from mpitrain.model.optimizers.step_hooks import OwnStep
from mpitrain.torch_versions import TorchDispatchMode
from tests.model.test_shard import OPTIMIZERS, make_model

SLICE_BYTES = 100


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr(SlicedStep, "slice_bytes", SLICE_BYTES)


def new_gradients(*modules):
    for parameters in zip(*(module.parameters() for module in modules), strict=True):
        gradient = torch.randn_like(parameters[0])
        for one in parameters:
            one.grad = gradient.clone()


class Made(TorchDispatchMode):
    """The largest tensor that is made while it is on."""

    largest_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and not any(
            found.untyped_storage().data_ptr() == one.untyped_storage().data_ptr()
            for one in args
            if isinstance(one, torch.Tensor)
        ):
            self.largest_bytes = max(self.largest_bytes, found.nbytes)
        return found


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"fused", "foreach"}))
def test_slices_are_stepped_to_torchs_own_bits_and_make_nothing_large(name):
    theirs, ours = make_model(), make_model()
    reference, optimizer = OPTIMIZERS[name](theirs), OPTIMIZERS[name](ours)
    step = OwnStep(optimizer)
    for _ in range(4):
        new_gradients(theirs, ours)
        versions = [one._version for one in ours.parameters()]
        reference.step()
        with Made() as made:
            step()
        for one, other, version in zip(theirs.parameters(), ours.parameters(), versions, strict=True):
            assert torch.equal(one, other) and other._version > version
            assert reference.state[one].keys() == optimizer.state[other].keys()
            for key, value in reference.state[one].items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizer.state[other][key])), key
        assert set(optimizer.state) <= set(ours.parameters())
    assert made.largest_bytes <= SLICE_BYTES


def test_hooks_see_the_whole_step_and_act():
    theirs, ours = make_model(), make_model()
    seen = []

    def double(optimizer, arguments, named):
        held = [one for group in optimizer.param_groups for one in group["params"]]
        seen.append([tuple(one.shape) for one in held])
        for one in held:
            one.grad.mul_(2)

    reference, optimizer = OPTIMIZERS["momentum"](theirs), OPTIMIZERS["momentum"](ours)
    step = OwnStep(optimizer)
    for one in (reference, optimizer):  # after it was made: what counts is what there is at the step
        one.register_step_pre_hook(double)
    new_gradients(theirs, ours)
    reference.step()
    step()
    assert len(seen) == 2 and seen[0] == seen[1]
    assert all(map(torch.equal, theirs.parameters(), ours.parameters()))


def test_a_step_of_the_users_own_is_taken_whole():
    class Own(torch.optim.SGD):
        num_steps = 0

        def step(self, closure=None):
            Own.num_steps += 1
            return super().step(closure)

    module = make_model()
    step = OwnStep(Own(module.parameters(), lr=0.1))
    new_gradients(module)
    step()
    assert Own.num_steps == 1


def test_a_scheduler_sees_that_steps_are_taken_and_slices_stay():
    module = make_model()
    optimizer = OPTIMIZERS["Adam"](module)
    scheduler = StepLR(optimizer, 1)
    step = OwnStep(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            new_gradients(module)
            with Made() as made:
                step()
            scheduler.step()
    assert made.largest_bytes <= SLICE_BYTES
