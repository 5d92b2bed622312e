"""A run with faults that are ordered. Argument: JSON of `path`, `strategy`, `every` and `orders`.

Where nobody waits for anybody, a victim that is slow to start would find all samples taken: the others wait for it."""

import json
import os
import sys
import time

import mpitrain as mt
from mpitrain.inject import Fault, read
from mpitrain.mpi.runtime import start
from mpitrain.values import parse
from tests import toy

runtime, asked = start(), json.loads(sys.argv[1])
orders, path = asked["orders"], asked["path"]
calls: list[int] = []
runtime.exit_code = 0
due = {one.worker + 1: one.at_step for one in read(orders) if isinstance(one, Fault)}


def loss(model, batch):
    calls.append(1)
    if due.get(runtime.rank, -1) == len(calls) - 1:
        open(f"{path}/reached-{runtime.rank}", "w").close()
    while len(calls) == 4 and not all(
        os.path.exists(f"{path}/reached-{rank}") for rank in due if rank != runtime.rank
    ):
        time.sleep(0.01)
    return toy.square_loss(model, batch)


job = toy.make_job(
    epochs=10,
    batch_size=4,
    loss=loss,
    checkpoint_every=asked["every"],
    on_nonfinite="skip",
    keep_checkpoints=9,
    validate=toy.Memory(),
)
result = mt.train(
    job,
    parse(asked["strategy"], "strategy"),
    run_dir=path,
    quiet=True,
    inject=orders,
    heartbeat_s=asked["heartbeat_s"],
)
runtime.exit_code = result["exit_code"]
