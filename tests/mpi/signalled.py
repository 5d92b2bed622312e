"""A job whose ranks stand still where a signal is to meet them: `SIGNALLED` names a folder, `PHASE` the place.

A rank that has come to the place leaves its number `at-RANK` there, and goes on when it has been asked to end, or when
`go` is there: so a test sends its signal at a known place, however fast the machine is. Only once, not after a restart.
"""

import os
import time
from pathlib import Path

from mpitrain.system.launched.launch_variables import launched_rank
from mpitrain.training import signals
from tests import toy

FOLDER, PHASE, DEAF = Path(os.environ["SIGNALLED"]), os.environ["PHASE"], "DEAF" in os.environ
STEP = 12
calls = []


def stand(phase):
    """Stand still, if this is the place."""
    at = FOLDER / f"at-{launched_rank()}"
    if phase == PHASE and not at.exists():
        at.with_suffix(".tmp").write_text(str(os.getpid()))
        at.with_suffix(".tmp").rename(at)
        while not (FOLDER / "go").exists() and (DEAF or not signals.asked()):
            time.sleep(0.005)
        (FOLDER / "go").touch()  # who is asked tells the others: a launch asks one rank of each node


def loss(model, batch):
    calls.extend([1] * model.training)  # rank 0 validates
    if model.training and len(calls) == STEP:
        stand("training")
    return toy.square_loss(model, batch)


def metrics(model, batch):
    stand("validating")
    return {}


if launched_rank() == 1:
    stand("preparing")  # the others wait for it, MPI is up

job = toy.make_job(
    epochs=20, batch_size=4, loss=loss, checkpoint_every="48", validate=toy.Memory(), metrics=metrics
)
