"""Whole runs, each into a folder of its name."""

import json
import sys
from pathlib import Path

import torch

import mpitrain as mt
from mpitrain.mpi.runtime import start
from mpitrain.values import parse
from tests import toy
from tests.mpi.cases import run_calls

size, rank, path = start().size, start().rank, Path(sys.argv[1])


def train(name, strategy, schedule=None, **changes):
    run_dir = str(path / name)
    return mt.train(toy.make_job(**changes), strategy, run_dir=run_dir, quiet=True, schedule=schedule)


def serial(servers):
    for name in ("sgd", "adam", "two_groups", "hooked"):
        train(f"serial-{name}", mt.Async(servers=servers), optimizer=getattr(toy, name))


def allreduce():
    for index, changes in enumerate(toy.DYADIC.values()):
        train(f"allreduce-{index}", mt.AllReduce(), **changes, epochs=1, batch_size=16 // size)
    if size == 2:
        train("dropout", mt.AllReduce())
    data = toy.Memory(52)
    train(
        "weighted", mt.AllReduce(), **toy.WEIGHTED, validate=data, batch_size=16 // size, metrics=toy.nothing
    )
    if size == 2:
        train("weighted-sharded", mt.Sharded(), **toy.WEIGHTED, validate=data, batch_size=8)


def lockstep(servers):
    workers = size - servers
    rules = [
        mt.Sync(servers=servers),
        mt.Backup(spare=0, servers=servers),
        mt.SoftSync(updates=workers, blocking=True, servers=servers),
        mt.StaleSync(bound=0, servers=servers),
    ]
    for index, changes in enumerate(toy.DYADIC.values()):
        for rule in rules:
            train(f"{rule.name}-{index}", rule, **changes, epochs=1, batch_size=16 // workers)
    if workers == 2:
        train("dropout", mt.Sync(servers=servers))


def windows(servers):
    workers = size - servers
    served = [mt.Sync(), mt.Backup(spare=0), mt.SoftSync(updates=workers, blocking=True)]
    data = toy.Memory(52, window_samples=4)  # the last round has 4 samples
    for index, changes in enumerate(toy.DYADIC.values()):
        for rule in served if servers else [mt.AllReduce()]:
            train(
                f"windows-{rule.name}-{index}", rule, **changes, data=data, epochs=1, batch_size=16 // workers
            )


def counts():
    for servers in (1, 2):
        result = train(f"counts-{servers}", mt.Async(servers=servers), epochs=5)
        (path / f"counts-{servers}" / f"returned-{rank}.json").write_text(json.dumps(result))
    train("ragged", mt.Async(), epochs=3, batch_size=7)
    train("ragged-allreduce", mt.AllReduce(), epochs=3, batch_size=7)
    train("dropped", mt.AllReduce(), epochs=3, batch_size=7, drop_last=True)


def between_reads(*texts):
    for index, text in enumerate(texts):
        data = toy.Memory(num_samples=96, num_features=5)
        train(f"between-{index}", parse(text, "strategy"), "decay(every=0.5)", data=data)


def nonfinite(name, text, action):
    calls = []  # every worker is dealt two batches before anybody is dealt a third

    def loss(model, batch):
        calls.append(1)
        value = toy.square_loss(model, batch)
        return value / 0 * (value - value) if rank == 2 and len(calls) == 2 else value

    result = train(
        f"nan-{name}", parse(text, "strategy"), loss=loss, epochs=2, batch_size=3, on_nonfinite=action
    )
    return result["exit_code"]


def diverged(name, text, batch_size):
    # one step, whose gradient is finite
    result = train(f"diverged-{name}", parse(text, "strategy"), **toy.DIVERGING, batch_size=batch_size)
    return result["exit_code"] - 1


def wrapped(text, schedules):
    # Last: one wrap a process, and servers leave the process inside it.
    torch.manual_seed(3)
    model = toy.linear_float32()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4, momentum=0.5)
    model, optimizer = mt.wrap(model, optimizer, parse(text, "strategy"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5) if schedules else None
    reader = toy.Memory().reader(None, 0)
    for step in range(10):
        optimizer.zero_grad()
        toy.linear_loss(model, reader.batch(0, 4 * step, 4)).backward()
        optimizer.step()
        if schedule:
            schedule.step()
    mt.finish()
    torch.save(model.state_dict(), path / "wrapped.pt")


sys.exit(run_calls(globals()))
