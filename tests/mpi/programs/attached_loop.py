"""A wrapped loop with everything that people attach to an optimizer, beside torch's own loop, to the bit.

Arguments: strategies, each run in turn (servers leave the process inside `wrap`: those with servers come last). The
workers of one launch are given the same batches, so the mean of their gradients is each one's own.
"""

import sys
import warnings

import torch
from torch.optim import lr_scheduler

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.mpi.process_group.process_group import leave_default_group
from mpitrain.mpi.runtime import start
from mpitrain.strategies.base import ServerStrategy, Strategy
from mpitrain.strategies.features import LOOP, why_not
from mpitrain.values import parse
from mpitrain.wrapping import loop
from tests import toy
from tests.mpi.cases import raises

warnings.filterwarnings("error", module="torch.optim")  # which warns of schedulers that count no steps
READER = toy.Memory(num_samples=128).reader(None, 0)


def train(text):
    """The model, the rates of every step, and what a hook saw of the parameters after every step."""
    torch.manual_seed(3)
    inner = model = called = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)
    )
    first, *rest = list(model.parameters())
    kept = optimizer = torch.optim.AdamW([{"params": rest}, {"params": [first], "lr": 0.003}], lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(number):
        batch = READER.batch(0, 4 * number, 4)
        optimizer.zero_grad()
        loss = toy.square_loss(called, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer if number % 2 else kept)  # whoever kept the user's own may step it
        scaler.update()
        return float(loss.detach())

    step(0)  # its momenta go along
    before = lr_scheduler.OneCycleLR(optimizer, [0.05, 0.01], total_steps=20)  # cycles betas, too
    seen = []

    def clip(*_):
        torch.nn.utils.clip_grad_norm_(inner.parameters(), 0.3)

    optimizer.register_step_pre_hook(clip)
    if text:
        loop._wrapped = None
        model, optimizer = mt.wrap(model, optimizer, parse(text, "strategy"))
        called = model.module  # as programs for torch's DDP write it
    after = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    optimizer.register_step_post_hook(
        lambda *_: seen.append([p.detach().clone() for p in inner.parameters()])
    )
    rates = []
    for number in range(1, 11):
        loss = step(number)
        before.step()
        after.step(loss)
        rates.append([group["lr"] for group in optimizer.param_groups])
    if text:
        refuse(text, model, optimizer)
        seen.append([p.detach().clone() for p in inner.parameters()])
        mt.finish()
        if torch.distributed.is_initialized():
            leave_default_group(start())
    else:
        seen.append(seen[-1])
    return [*inner.parameters()], rates, seen


def refuse(text, model, optimizer):
    """What cannot act says so."""
    strategy = parse(text, "strategy")
    assert isinstance(strategy, Strategy)
    served = isinstance(strategy, ServerStrategy) and strategy.optimizer == "server" and not strategy.elastic
    calls = [lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})]
    if served:
        calls += [optimizer.state_dict, lambda: optimizer.load_state_dict({})]
    else:
        optimizer.load_state_dict(optimizer.state_dict())
    if text.startswith("allreduce"):
        return
    if why_not("changes in place", strategy, LOOP):
        with torch.no_grad():
            next(model.parameters()).mul_(1)
        for _ in range(2):
            raises(UsageError, "the loop, its forward pass or its loss changes '0.weight'", optimizer.step)
    for call in calls:
        try:
            call()
        except UsageError as error:
            assert "mpitrain.wrap" in str(error), error
        else:
            raise AssertionError("accepted")


def same(one, other, text):
    """To the bit, unless a worker adds what has changed, which rounds."""
    pairs = zip(one, other, strict=True)
    if "worker" in text or text == "decentralized()":
        return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)
    return all(torch.equal(a, b) for a, b in pairs)


for text in sys.argv[1:]:
    wrapped, expected = train(text), train("")
    assert wrapped[1] == expected[1], (wrapped[1], expected[1])
    assert len(set(map(tuple, expected[1]))) == 10 and len(wrapped[2]) == 11
    for number, (ours, theirs) in enumerate(zip(wrapped[2], expected[2], strict=True)):
        assert same(ours, theirs, text), f"{text}: step {number}"
    if not text.startswith("elastic"):  # whose centre is not the worker's
        assert same(wrapped[0], expected[0], text), text
    print(f"ok {text}", flush=True)
