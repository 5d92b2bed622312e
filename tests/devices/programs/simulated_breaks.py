"""What a test plants on the simulated accelerator: `simulated_breaks.py DIRECTORY JSON`, what `call_on` has to call.

Each rank says what it found; whoever forgets to wait finds numbers that are not there yet, every time: the streams do
nothing for ten minutes unless somebody waits for them.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import mpitrain as mt
from mpitrain.data.read import batch
from mpitrain.devices import accelerator
from mpitrain.mpi.memory import staging
from mpitrain.mpi.runtime import start
from tests.devices import simulated
from tests.mpi import splits
from tests.mpi.cases import run_calls

runtime = start()
library = simulated.load(600_000)
waits = staging.TorchDevice.wait_for


def begin():
    dist.init_process_group("mpi4py")


def end():
    dist.destroy_process_group()


def add_up(name):
    """A sum over ranks of what this rank's device has yet to write."""
    device = accelerator.of_rank(simulated.NAME, runtime.local_rank)
    tensor = torch.zeros(300, device=device)
    torch.accelerator.synchronize(device)
    tensor += runtime.rank + 1
    dist.all_reduce(tensor)
    right = bool((tensor.cpu() == runtime.size * (runtime.size + 1) / 2).all())
    print(f"{name}: {'right' if right else 'wrong'}", flush=True)


def no_wait_for_kernels():
    """MPI's copy does not wait for what was queued before."""
    staging.TorchDevice.wait_for = lambda self, event: None


def no_wait_for_copies():
    """MPI reads a buffer before the copy to it has ended."""
    staging.TorchDevice.wait_for = waits

    def copy(self, target, source):
        with torch.Stream(target.device if source.is_cpu else source.device):
            target.copy_(source, non_blocking=True)

    accelerator.CopyStreams.copy = copy


def read_directly():
    """MPI takes the address for one that it may read; what Open MPI does with the fault comes after its name."""
    library.simulated_name_faults()
    add_up("directly")


def train_on_another():
    """Batches lie on the node's first device, whichever the model lies on."""
    moved = batch.to_device
    for module in list(sys.modules.values()):
        if getattr(module, "to_device", None) is moved:
            vars(module)["to_device"] = lambda one, device: moved(one, torch.device(simulated.NAME, 0))
    job = splits.changed(splits.deep_job(), device=simulated.NAME, batch_size=3)
    mt.train(job, mt.AllReduce(), run_dir=str(Path(sys.argv[1]) / "run"), quiet=True)


run_calls(globals())
