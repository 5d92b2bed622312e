"""A GAN as a job, and in a loop of one's own, each into a folder of its name: `gan_runs.py DIRECTORY`."""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import mpitrain as mt
from mpitrain.checkpoint.parts import candidates
from mpitrain.errors import UsageError
from mpitrain.mpi.process_group.process_group import leave_default_group
from mpitrain.mpi.runtime import start
from mpitrain.strategies.base import read_strategy
from mpitrain.values import parse
from mpitrain.wrapping import loop
from tests import toy
from tests.mpi import gan

runtime, root = start(), Path(sys.argv[1])


def train(name, **changes):
    job = gan.make_job(**{"batch_size": gan.BATCH // runtime.size} | changes)
    mt.train(job, mt.AllReduce(), run_dir=str(root / name), quiet=True)


def own_loop(name, text, steps=range(6), resume=None, save_after=None):
    """Every worker takes its share of every batch; `steps`: of the loop."""
    strategy = read_strategy(text)
    loop._wrapped = None
    torch.manual_seed(0)
    networks = gan.networks()
    model, optimizers = torch.nn.ModuleDict(), {}
    for part, make in gan.OPTIMIZERS.items():
        named = part == "discriminator"
        own = make(networks[part].named_parameters() if named else networks[part].parameters())
        model[part], optimizers[part] = mt.wrap(networks[part], own, strategy, resume=resume)
    done = mt.resumed().step if mt.resumed() else 0
    assert done == (steps[0] if resume else 0), (done, steps)
    reader = gan.DATA.reader(None, 0)
    for number in steps:
        first, size = 12 * (number % 2), gan.BATCH // mt.num_workers()
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        gan.step(model, optimizers, reader.batch(0, first + size * mt.worker_index(), size))
        if number + 1 == save_after:
            mt.save(root / "saved" / name, number + 1, state=number)
    mt.finish()
    if runtime.rank == 0:
        save_file(dict(networks.state_dict()), root / f"{name}.safetensors")
    runtime.barrier()
    leave_default_group(runtime)


train("plain", log_every=1)
train("clipped", clip_norm=0.1)
train("scheduled", scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
train("checkpointed", checkpoint_every="24", keep_checkpoints=9, ema=0.5)
train("accumulated", accumulate=2, batch_size=gan.BATCH // runtime.size // 2, data=toy.Memory(24))
for text in ("sync()", "localsgd(period=1)", 'sync(optimizer="worker")', 'async(optimizer="worker")'):
    strategy = read_strategy(text)
    if runtime.size > strategy.num_servers():
        job = gan.make_job(batch_size=4, data=toy.Memory(24))
        mt.train(job, strategy, run_dir=str(root / f"job {text}"), quiet=True)
if runtime.rank == 0:
    folder = min((one.folder for one in candidates(root / "checkpointed", [])), key=lambda one: int(one.name))
    shutil.copytree(folder, root / "cut" / "checkpoints" / folder.name)
runtime.barrier()
mt.train(
    gan.make_job(batch_size=gan.BATCH // runtime.size),
    mt.AllReduce(),
    run_dir=str(root / "resumed"),
    resume=str(root / "cut"),
    quiet=True,
)
for text in ("allreduce()", "localsgd(period=1)"):
    own_loop(text, text, save_after=3)
    own_loop(f"{text} resumed", text, range(3, 6), str(root / "saved" / text))
network = torch.nn.Linear(2, 2)
for text in ("async()", "decentralized()", "localsgd(period=2)"):
    try:
        mt.wrap(network, torch.optim.SGD(network.parameters(), lr=0.1), parse(text, "strategy"))
    except UsageError as error:
        print(f"refused {text}: {error}", flush=True)
