"""Losses that ask more of a model than to be called: what two ranks make of them, against one process with the whole
batch."""

import functools
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import mpitrain as mt
from mpitrain.values import parse
from tests.mpi import splits
from tests.mpi.cases import run_cases


class Autoencoder(nn.Module):
    """With methods, a plain attribute, a parameter of its own, and a weight that is used twice."""

    width = 6

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(5, self.width), nn.Linear(self.width, 1)
        self.scale = nn.Parameter(torch.ones(self.width))
        self.double()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) * self.scale

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        return self.out(code)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


def through_methods(model: Any, batch: Any) -> torch.Tensor:
    code = model.encode(batch["x"].double())
    assert code.shape[1] == model.width
    return (model.decode(code) - batch["y"]).square().mean() + 0.1 * code.square().mean()


def through_module(model: Any, batch: Any) -> torch.Tensor:
    return (model.module.decode(model.module.encode(batch["x"].double())) - batch["y"]).square().mean()


def penalised(model: Any, batch: Any) -> torch.Tensor:
    """Weights that the forward pass uses, too, and a head that is tied to the first layer."""
    tied = model.encode(batch["x"].double()) @ model.inner.weight
    penalty = sum(one.square().sum() for name, one in model.named_parameters() if "weight" in name)
    return (
        (tied - batch["x"]).square().mean()
        + (model(batch["x"].double()) - batch["y"]).square().mean()
        + penalty / 9
    )


def part_alone(model: Any, batch: Any) -> torch.Tensor:
    """A layer without the rest, twice, as contrastive losses do."""
    one, other = (model.encode(scale * batch["x"].double()) for scale in (1.0, 0.5))
    return (one - other + 1).square().mean() + (model.out(one) - batch["y"]).square().mean()


def job_of(loss: Any) -> mt.Job:
    return splits.changed(
        splits.deep_job(), model=Autoencoder, loss=loss, stages=None, tensor_plan={"inner": "gather"}
    )


def check(text: str, loss: Any) -> None:
    """Training of two ranks is that of one with the whole batch."""
    strategy: Any = parse(text, "strategy")
    share = strategy.num_replicas(2 - strategy.num_servers())
    job = splits.changed(job_of(loss), batch_size=splits.BATCH // share)
    mt.train(job, strategy, run_dir=f"{loss.__name__}-{text}", quiet=True)
    whole: Any = job_of(loss)
    if loss is through_module:
        whole = splits.changed(whole, loss=functools.partial(_called_plainly, loss))
    expected, _ = splits.serial(whole, 1)
    found = load_file(str(Path(f"{loss.__name__}-{text}") / "model.safetensors"))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


def _called_plainly(loss: Any, model: Any, batch: Any) -> Any:
    class Wrapped:
        module = model

    return loss(Wrapped, batch)


def case_allreduce(rt: Any) -> None:
    for loss in (through_methods, through_module, penalised, part_alone):
        check("allreduce()", loss)


def case_sharded(rt: Any) -> None:
    for loss in (through_methods, through_module, part_alone):
        check("sharded()", loss)


def case_tensor(rt: Any) -> None:
    for loss in (through_methods, through_module, part_alone):
        check("tensor()", loss)


def case_servers(rt: Any) -> None:
    for loss in (through_methods, through_module, penalised):
        check("sync()", loss)


run_cases(globals())
