"""One process without a launcher: runs that fail raise, and the next one trains: `failing_alone.py DIRECTORY`."""

import signal
import sys
import threading
from pathlib import Path

import torch
from torch.distributed import distributed_c10d

import mpitrain as mt
from mpitrain.errors import AgreedError
from mpitrain.values import parse
from tests import toy

root = Path(sys.argv[1])


class Broken:
    """Fails in the third step."""

    def __init__(self, error):
        self.error, self.calls = error, 0

    def __call__(self, model, batch):
        self.calls += 1
        if self.calls == 3:
            raise self.error
        return toy.square_loss(model, batch)


handler = signal.getsignal(signal.SIGTERM)
texts = ["allreduce()", "allreduce(codec=topk())", "localsgd(period=2)", "decentralized()", "sharded()"]
for number, text in enumerate(texts):
    strategy = parse(text, "strategy")
    job = toy.make_job(checkpoint_every="6", tensor_plan={"0": "column"}, model=toy.smooth)
    for error in (ValueError("mine"), KeyboardInterrupt()):
        failing = toy.make_job(loss=Broken(error), tensor_plan={"0": "column"}, model=toy.smooth)
        try:
            mt.train(failing, strategy, run_dir=str(root / f"{number}"), quiet=True)
        except type(error) as raised:
            assert raised is error
        else:
            raise AssertionError("nothing was raised")
    result = mt.train(job, strategy, run_dir=str(root / f"{number}"), quiet=True)
    assert result["status"] == "ok" and result["samples"] == 96, result
# a stop button while the group of all ranks is made, and while it is destroyed
for name in ("_update_default_pg", "_unregister_all_process_groups"):
    made = getattr(distributed_c10d, name)

    def pressed(*arguments, made=made, name=name):
        setattr(distributed_c10d, name, made)
        made(*arguments)
        signal.raise_signal(signal.SIGINT)

    setattr(distributed_c10d, name, pressed)
    for error in (KeyboardInterrupt, None):
        try:
            mt.train(toy.make_job(), mt.AllReduce(), run_dir=str(root / name), quiet=True)
        except KeyboardInterrupt:
            assert error is KeyboardInterrupt, f"stopped again after {name}"
        else:
            assert error is None, f"not stopped in {name}"
        assert not torch.distributed.is_initialized()
try:
    mt.train(toy.make_job(), mt.Async(), run_dir=str(root / "alone"))
except AgreedError as error:
    assert error.exit_code == 2
else:
    raise AssertionError("a server and no worker")
assert signal.getsignal(signal.SIGTERM) is handler
alive = [thread.name for thread in threading.enumerate() if "watchdog" in thread.name.lower()]
assert not alive, alive
print("goes on", flush=True)
raise LookupError("of the script's own")
