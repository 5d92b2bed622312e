"""Runs whose input is wrong in many ways, and one that ends in its middle.

Arguments: a folder, and how that one ends.
"""

import sys
from typing import Any

import torch

import mpitrain as mt
from mpitrain.errors import AgreedError
from mpitrain.mpi.runtime import start
from mpitrain.reporting.environment import code_places, code_versions
from mpitrain.training import session
from tests import toy

rank, path = start().rank, sys.argv[1]


class Layerwise(torch.optim.SGD):
    pass


def other_model_on_rank_one():
    return torch.nn.Linear(5, 1) if rank == 1 else toy.perceptron()


def run(name, job, options):
    print(f"== {name}", file=sys.stderr, flush=True)
    try:
        mt.train(job, **({"run_dir": f"{path}/run", "quiet": True} | options))
    except AgreedError as error:
        print(f"code {error.exit_code}", file=sys.stderr, flush=True)
    else:
        print("trained", file=sys.stderr, flush=True)


CASES: dict[str, tuple[mt.Job, dict[str, Any]]] = {
    "too few ranks": (toy.make_job(), {"strategy": mt.Async(servers=3)}),
    "too many workers": (toy.make_job(data=toy.Memory(num_samples=1)), {"strategy": mt.Async()}),
    "layerwise": (toy.make_job(optimizer=lambda p: Layerwise(p, lr=0.1)), {"strategy": mt.Async()}),
    "no shard": (toy.make_job(data=mt.Shards(f"{path}/none/train-*.h5")), {}),
    "no synthetic": (toy.make_job(), {"synthetic": True}),
    "wrong rate": (toy.make_job(), {"lr": -1.0}),
    "other model": (toy.make_job(model=other_model_on_rank_one), {"strategy": mt.Async()}),
    "run dir": (toy.make_job(), {"run_dir": f"{path}/file/below"}),
    "truncated": (toy.make_job(data=mt.Shards(f"{path}/truncated.h5")), {}),
    "other rate": (toy.make_job(), {"lr": 0.5 / (1 + rank)}),
}
for name, (job, options) in CASES.items():
    run(name, job, options)
if rank == 1:
    session.code_places = lambda: ["/somewhere/else"]
    session.code_versions = lambda: {**code_versions(), "mpitrain": "0 (changed)"}
run("other code", toy.make_job(), {})
session.code_places, session.code_versions = code_places, code_versions

print("== end", file=sys.stderr, flush=True)


def raising(model, batch):
    if rank == 2:
        raise RuntimeError("planted in the loss")
    return toy.square_loss(model, batch)


ENDS: dict[str, dict[str, Any]] = {
    "raise": {"loss": raising},
    "flipped": {"data": mt.Shards(f"{path}/flipped.h5")},
}
mt.train(toy.make_job(**ENDS[sys.argv[2]]), mt.Async(), run_dir=f"{path}/run", quiet=True)
