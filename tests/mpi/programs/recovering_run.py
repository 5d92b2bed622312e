"""A run that may lose ranks, and then trains again. Argument: JSON of its options."""

import json
import sys

import torch

import mpitrain as mt
from mpitrain.mpi.runtime import start
from mpitrain.values import parse
from tests import toy

asked = json.loads(sys.argv[1])
job = toy.make_job(
    epochs=6, batch_size=4, checkpoint_every=asked["every"], keep_checkpoints=99, validate=toy.Memory(),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=24),
)  # fmt: skip
result = mt.train(
    job,
    parse(asked["strategy"], "strategy"),
    run_dir=asked["path"],
    quiet=True,
    resume=asked["resume"],
    inject=asked["inject"],
    watchdog_s=asked["watchdog_s"],
)
start().exit_code = result["exit_code"]
if result.get("lost"):  # those that are left may train again
    again = mt.train(
        toy.make_job(checkpoint_every="never"), mt.AllReduce(), run_dir=f"{asked['path']}/again", quiet=True
    )
    assert (again["workers"], again["samples"], again["lost"]) == (start().size, 2 * 48, {}), again
