"""A run over tables with faults that are ordered: `table_faults.py JSON`, JSON of `path`, `strategy`, `orders` and,
where ids are to be bad, `bad`: the rank. The others wait until every victim has come to its step."""

import dataclasses
import json
import os
import sys
import time
from functools import partial

import mpitrain as mt
from mpitrain.inject import Fault, read
from mpitrain.mpi.runtime import start
from mpitrain.strategies.base import Strategy
from mpitrain.values import parse
from tests import sparse_jobs

runtime, asked = start(), json.loads(sys.argv[1])
strategy = parse(asked["strategy"], "strategy")
assert isinstance(strategy, Strategy)
num_servers = strategy.num_servers()
due = {one.worker + num_servers: one.at_step for one in read(asked["orders"]) if isinstance(one, Fault)}
calls: list[int] = []
runtime.exit_code = 0


def reached(rank):
    return f"{asked['path']}/reached-{rank}"


def words(batch):
    found = sparse_jobs.many(batch)
    if asked.get("bad") == runtime.rank and runtime.step == 1:
        found[1, 3] = sparse_jobs.ROWS
    return found


def loss(model, batch):
    calls.append(1)
    if runtime.step == due.get(runtime.rank):
        open(reached(runtime.rank), "w").close()
    while runtime.step == 3 and not all(
        os.path.exists(reached(rank)) for rank in due if rank != runtime.rank
    ):
        time.sleep(0.01)
    return sparse_jobs.linear_loss(model, batch, words)


job = dataclasses.replace(sparse_jobs.make_job(epochs=8), loss=partial(loss))
result = mt.train(job, strategy, run_dir=asked["path"], quiet=True, inject=asked["orders"])
runtime.exit_code = result["exit_code"]
