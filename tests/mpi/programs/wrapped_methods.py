"""Wrapped loops that ask more of a model than to be called: two ranks against one process with the whole batch."""

import copy
import functools
import pickle
from typing import Any

import torch

import mpitrain as mt
from mpitrain.errors import ReplicasPartedError, UsageError
from mpitrain.model.gradient.loss_pass import name_itself
from mpitrain.mpi.process_group.process_group import leave_default_group
from mpitrain.values import parse
from mpitrain.wrapping import loop, same_samples
from tests import toy
from tests.mpi.cases import raises, run_cases
from tests.mpi.model_losses import (
    Autoencoder,
    computed_again,
    encoder_alone,
    part_alone,
    penalised,
    through_methods,
    through_module,
)

LOSSES = (through_methods, through_module, penalised, part_alone)
READER = toy.Memory(num_samples=128).reader(None, 0)


def make() -> Any:
    torch.manual_seed(3)
    model = Autoencoder()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def share(number: int, whole: bool = False) -> Any:
    batch = READER.batch(0, 8 * number, 8)
    return batch if whole else {name: one[mt.worker_index() :: 2] for name, one in batch.items()}


def wrapped(text: str, **options: Any) -> Any:
    loop._wrapped = None
    model, optimizer = make()
    inner = model
    model, optimizer = mt.wrap(model, optimizer, parse(text, "strategy"), **options)
    assert model is inner and model.width == 6 and model.module is model
    assert "module" not in "".join(model.state_dict())
    return model, optimizer


def step(model: Any, optimizer: Any, *losses: Any) -> None:
    optimizer.zero_grad()
    for loss in losses:
        loss.backward()
    optimizer.step()


def same(model: Any, expected: Any) -> None:
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=name)


def alike(ours: Any, alone: Any, *losses: Any) -> None:
    """A step for each loss, of the wrapped model and of one process with the whole batch, end in the same."""
    for number, loss in enumerate(losses):
        step(*ours, loss(ours[0], share(number)))
        step(*alone, loss(alone[0], share(number, whole=True)))
    same(ours[0], alone[0])


def leave(rt: Any) -> None:
    mt.finish()
    leave_default_group(rt)


def case_whatever_the_loss_calls(rt: Any) -> None:
    for text in ("allreduce()", "localsgd(period=2,start=8)"):
        for loss in LOSSES:
            ours, alone = wrapped(text), make()
            name_itself(alone[0])
            alike(ours, alone, *[loss] * 4)
            leave(rt)


def case_parameters_that_are_left_out_keep_their_values(rt: Any) -> None:
    """By all ranks: as in one process, neither decay nor momenta act on them; found at the first step, or announced."""
    for options in ({}, {"find_unused_parameters": True}):
        ours, alone = wrapped("allreduce()", **options), make()
        third = through_methods if options else encoder_alone
        alike(ours, alone, encoder_alone, encoder_alone, third, encoder_alone)
        assert (ours[0].out.weight.grad is None) == (alone[0].out.weight.grad is None)
        leave(rt)


def case_several_backward_passes_of_a_step(rt: Any) -> None:
    """Which share layers; and gradients that add up before they are averaged, all at once."""
    (model, optimizer), (expected, own) = wrapped("allreduce()"), make()
    for number in range(3):
        for one, which, whole in ((model, optimizer, False), (expected, own, True)):
            batches = [share(2 * number, whole), share(2 * number + 1, whole)]
            step(one, which, *(through_methods(one, batch) for batch in batches))
    optimizer.zero_grad(), own.zero_grad()
    with model.no_sync():
        through_methods(model, share(8)).backward()
        alone = model.inner.weight.grad.clone()
    through_methods(model, share(9)).backward()
    for number in (8, 9):
        through_methods(expected, share(number, whole=True)).backward()
    assert not torch.allclose(model.inner.weight.grad, alone, rtol=1e-3)
    optimizer.step(), own.step()
    same(model, expected)
    same(copy.deepcopy(model), expected)
    same(pickle.loads(pickle.dumps(model)), expected)
    leave(rt)


def case_what_a_later_step_leaves_out_is_named(rt: Any) -> None:
    model, optimizer = wrapped("allreduce()")
    step(model, optimizer, through_methods(model, share(0)))
    raises(
        UsageError,
        "does not depend on out.weight, out.bias in this step",
        lambda: step(model, optimizer, encoder_alone(model, share(1))),
    )
    leave(rt)


def case_layers_that_the_backward_pass_computes_anew(rt: Any) -> None:
    """Their graph is made in the pass: it cannot be asked which parameters the pass leaves out."""
    model, optimizer = wrapped("allreduce()")
    raises(
        UsageError, "use_reentrant=False, or", lambda: step(model, optimizer, computed_again(model, share(0)))
    )
    leave(rt)
    alike(wrapped("allreduce()", find_unused_parameters=False), make(), *[computed_again] * 3)
    leave(rt)


def case_replicas_that_part_are_told(rt: Any) -> None:
    """By what the loop changes in place, or by gradients that nobody averages."""
    for text, said in (
        ("allreduce()", "changes 'out.weight' in place"),
        ("localsgd(period=2,start=8)", "'out.weight' of rank 1"),
    ):
        model, optimizer = wrapped(text)
        with torch.no_grad():
            model.out.weight.clamp_(-0.1, 0.1)  # alike on all ranks
        step(model, optimizer, through_methods(model, share(0)))
        with torch.no_grad():
            model.out.weight.add_(mt.worker_index())
        loss = through_methods(model, share(1))
        raises(ReplicasPartedError, said, functools.partial(step, model, optimizer, loss))
        leave_default_group(rt)
    model, optimizer = wrapped("allreduce()")
    with model.no_sync():
        loss = through_methods(model, share(0))
        raises(ReplicasPartedError, "of rank 1", functools.partial(step, model, optimizer, loss))
    leave_default_group(rt)


def case_samples_that_nobody_has_divided_are_told(rt: Any) -> None:
    """Once, at the first step, by one rank; whether the loop clips or not."""
    told: list[str] = []
    same_samples.tell = told.append
    for undivided in (False, True):
        model, optimizer = wrapped("allreduce()")
        for number in range(2):
            loss = through_methods(model, share(number, whole=undivided))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
        leave(rt)
        expected = 1 if undivided and not rt.rank else 0
        assert len(told) == expected and all("do they train on the same samples?" in text for text in told)


def case_what_others_would_undo_is_refused(rt: Any) -> None:
    model, optimizer = wrapped("decentralized()")
    step(model, optimizer, through_module(model, share(0)))
    with model.no_sync(), torch.no_grad():
        model.out.weight.clamp_(-0.1, 0.1)
    raises(
        UsageError,
        "the loop, its forward pass or its loss changes 'out.weight' in place",
        lambda: step(model, optimizer, through_methods(model, share(1))),
    )
    mt.finish()


run_cases(globals())
