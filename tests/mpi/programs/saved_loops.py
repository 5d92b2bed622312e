"""Loops of one's own that are saved, and that go on from there."""

import sys
from pathlib import Path
from typing import Any

import torch

import mpitrain as mt
from mpitrain.mpi.process_group.process_group import leave_default_group
from mpitrain.mpi.runtime import start
from mpitrain.training.measure import save_model
from mpitrain.values import parse
from mpitrain.wrapping import loop
from tests import toy
from tests.mpi.cases import run_calls

path = Path(sys.argv[1])
runtime, reader = start(), toy.Memory(num_samples=128).reader(None, 0)


def normed():
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7),
        torch.nn.BatchNorm1d(7),
        torch.nn.Tanh(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(7, 1),
    )


def still(parameters):
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9, weight_decay=1e-3)


def in_16_bits():
    """Each layer in numbers of its own."""
    model = normed()
    for layer in model[::4]:
        layer.bfloat16()
    model[4].register_forward_pre_hook(lambda _, inputs: inputs[0].bfloat16())
    model[1].register_forward_pre_hook(lambda _, inputs: inputs[0].float())
    model[0].register_forward_pre_hook(lambda _, inputs: inputs[0].bfloat16())
    return model


def train(name, text, optimizer, saves, resume=None, last=12):
    torch.manual_seed(3)
    inner = model = in_16_bits() if "16 bits" in name else normed()
    loop._wrapped = None  # one wrap a process is all that scripts need
    make: Any = still if optimizer == "still" else getattr(toy, optimizer)
    model, optimizer = mt.wrap(
        model, make(model.parameters()), parse(text, "strategy"), resume and str(path / resume)
    )
    begun = mt.resumed()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    if begun is not None:
        schedule.load_state_dict(begun.state["schedule"])
    for step in range(begun.step if begun else 0, last):
        batch = reader.batch(0, 8 * step + 4 * mt.worker_index(), 4)
        torch.manual_seed(step * 100 + mt.worker_index())
        optimizer.zero_grad()
        toy.square_loss(model, batch).backward()
        optimizer.step()
        schedule.step()
        if saves and step + 1 == 5:
            told = {"schedule": schedule.state_dict(), "worker": mt.worker_index()}
            mt.save(str(path / name), 5, told)
    if begun is not None:
        assert (begun.step, begun.state["worker"]) == (5, mt.worker_index()), begun
    mt.finish()
    save_model(inner, path / f"{name}-{mt.worker_index()}.safetensors", {})
    if torch.distributed.is_initialized():
        leave_default_group(runtime)


run_calls(globals())
