"""Nobody dies: some ranks are only told so, in the middle of a step, and the others hear of it from them.

Arguments: a folder, and JSON of name -> (codec, ranks that are told).
"""

import gc
import json
import sys
import time
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

import mpitrain as mt
from mpitrain.mpi.faults.shrink import process_failed
from mpitrain.mpi.runtime import start
from mpitrain.strategies.checkpoint_policy import Cadence
from mpitrain.training.synchronous.stepper import Stepper
from mpitrain.values import parse
from tests import toy

runtime, path = start(), Path(sys.argv[1])
update = Stepper.update
alarmed: list[int] = []
met: set[str] = set()
lost: set[str] = set()


def alarming(self, value, share, count):
    if self.step == 5 and name not in met:
        met.add(name)
        (path / f"{name}.{runtime.rank}").touch()
        # who is alarmed earlier breaks off the others' allreduce
        while len(list(path.glob(f"{name}.*"))) < runtime.size:
            time.sleep(0.001)
        # it is done everywhere: who is not alarmed takes the step, the others have lost it
        if runtime.rank in alarmed:
            lost.add(name)
            raise process_failed()
    loss = update(self, value, share, count)
    if self.step == 7 and name in lost:  # the trainers before this one are gone, and with them DDP's hooks
        gc.collect()
        assert sum(isinstance(one, DistributedDataParallel) for one in gc.get_objects()) == 1
    return loss


Stepper.update, seldom = alarming, Cadence.steps_to_next_question
for name, (codec, alarmed) in json.loads(sys.argv[2]).items():
    # the others hear of the loss in the next step, or between two steps, where they ask who has to end
    Cadence.steps_to_next_question = (lambda *_: 1) if name.startswith("asking") else seldom
    model = toy.normed if name.startswith("normed") else toy.perceptron
    job = toy.make_job(model=model, epochs=6, batch_size=4, checkpoint_every="never")
    result = mt.train(
        job, parse(f"allreduce({codec})", "strategy"), run_dir=str(path / name), quiet=True, watchdog_s=0.0
    )
    assert result["exit_code"] == 0 and result["lost"] == {}, result
    assert [row["step"] for row in result["recoveries"]] == {0: [], 3: [5]}.get(len(alarmed), [6]), result
