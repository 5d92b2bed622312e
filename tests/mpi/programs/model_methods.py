"""Losses that ask more of a model than to be called: what two ranks make of them, against one process with the whole
batch."""

import functools
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.values import parse
from tests.mpi import splits
from tests.mpi.cases import run_cases
from tests.mpi.model_losses import Autoencoder, part_alone, penalised, through_methods, through_module


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
