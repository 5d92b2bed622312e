"""The digits job, whose server kills itself when two checkpoints are there. Only on the run's first start, and only
where MORTAL names its directory; workers stand still at their sixtieth batch until it has, so it is never too late."""

import dataclasses
import os
import runpy
import signal
import threading
import time
from pathlib import Path

_digits = runpy.run_path(str(Path(__file__).parents[2] / "jobs" / "digits.py"))["job"]
_run = Path(os.environ["MORTAL"])
_done = Path(f"{_run}.killed")
_first_start = not _done.exists()
_calls = []


def _die():
    while len(list(_run.glob("checkpoints/0*/shard-0.json"))) < 2:
        time.sleep(0.02)
    _done.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def loss(model, batch):
    if model.training:  # the validator calls it too
        _calls.append(1)
    while _first_start and len(_calls) == 60 and model.training and not _done.exists():
        time.sleep(0.02)
    return _digits.loss(model, batch)


if _first_start and os.environ.get("SLURM_PROCID") == "0":
    threading.Thread(target=_die, daemon=True).start()
job = dataclasses.replace(_digits, loss=loss, epochs=4, target={"accuracy": 0.9})
