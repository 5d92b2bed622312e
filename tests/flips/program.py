"""Runs of the campaign, one after the other on these ranks: `program.py DIRECTORY JSON`, JSON of a list of cases.

Of each case rank 0 prints a line of JSON: what came of it. An undisturbed run of each kind is made first.
"""

import contextlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import mpitrain as mt
from mpitrain.errors import AgreedError
from mpitrain.mpi.runtime import start
from mpitrain.strategies.base import Strategy
from mpitrain.values import parse
from tests import toy
from tests.flips.draw import STEPS, Case

OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
}
root, rank = Path(sys.argv[1]), start().rank
undisturbed: dict[str, dict[str, torch.Tensor]] = {}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))


def train(name: str, case: Case, **options: object) -> dict[str, object]:
    strategy = parse(case.strategy, "strategy")
    assert isinstance(strategy, Strategy)
    job = toy.make_job(
        model=model, loss=toy.square_loss, optimizer=OPTIMIZERS[case.optimizer], batch_size=4, epochs=100,
        checkpoint_every="never", validate=None,
    )  # fmt: skip
    return mt.train(job, strategy, run_dir=str(root / name), quiet=True, steps=STEPS, **options)


def outcome_of(case: Case) -> dict[str, object]:
    """What came of one case, on rank 0."""
    kind = f"{case.strategy} {case.optimizer} {case.options['in_messages']}"
    options = {key: value for key, value in case.options.items() if key != "in_messages"}
    if kind not in undisturbed:
        # an order that comes after the end has payloads travel as those of the case do
        order = f"flip(worker=0,at_step={10 * STEPS},what='payload')" if case.options["in_messages"] else ()
        train(f"undisturbed-{len(undisturbed)}", case, inject=order)
        path = root / f"undisturbed-{len(undisturbed)}" / "model.safetensors"
        start().barrier()
        undisturbed[kind] = load_file(path)
    name, found = str(case.number), {**case._asdict()}
    try:
        with contextlib.redirect_stderr(None):
            result = train(name, case, inject=case.order, **options)
    except AgreedError as error:
        return found | {"times": 0, "redone_steps": 0, "same": False, "error": str(error).splitlines()[-1]}
    saved = load_file(root / name / "model.safetensors") if rank == 0 else {}
    same = all(torch.equal(saved[key], one) for key, one in undisturbed[kind].items()) if rank == 0 else False
    failure = result.get("failure") or ""
    return found | {**result.get("went_back", {}), "same": same, "error": failure}


for row in json.loads(sys.argv[2]):
    came = outcome_of(Case(*row))
    if rank == 0:
        print(json.dumps(came), flush=True)
