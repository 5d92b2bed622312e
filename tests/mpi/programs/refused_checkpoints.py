"""A run, and others that are to go on from what is no checkpoint of theirs."""

import resource
import sys
from pathlib import Path
from typing import Any

import mpitrain as mt
from mpitrain.errors import AgreedError
from mpitrain.mpi.runtime import start
from tests import toy

path = Path(sys.argv[1])


def fill_disk(model, batch):
    if start().rank == 1:  # which saves the model
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))
    return toy.square_loss(model, batch)


full: dict[str, Any] = {"loss": fill_disk, "checkpoint_every": "never"}
other: dict[str, Any] = {"model": toy.linear_float32, "loss": toy.linear_loss}
mt.train(toy.make_job(checkpoint_every="96"), mt.Sync(), run_dir=str(path / "start"), quiet=True)
for name, changes in (
    ("start", other),
    ("nowhere", {}),
    ("damaged", {}),
    ("outdated", {}),
    ("held", {}),
    ("full", full),
):
    print(f"== {name}", file=sys.stderr, flush=True)
    try:
        mt.train(
            toy.make_job(**changes),
            mt.Sync(),
            run_dir=str(path / ("held" if name == "held" else "again")),
            quiet=True,
            resume=None if name in ("held", "full") else str(path / name),
        )
    except AgreedError as error:
        print(f"code {error.exit_code}", file=sys.stderr, flush=True)
