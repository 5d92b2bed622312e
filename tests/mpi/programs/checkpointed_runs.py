"""Runs that write checkpoints, or go on from one."""

import sys
from pathlib import Path

import mpitrain as mt
from mpitrain.checkpoint import parts
from mpitrain.mpi import runtime
from mpitrain.values import parse
from tests import toy
from tests.mpi.cases import run_calls


class CountedFile:
    """A file whose reads are counted."""

    num_bytes = 0

    def __init__(self, file):
        self.file = file
        self.fileno = file.fileno

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def read(self, num_bytes=-1):
        found = self.file.read(num_bytes)
        CountedFile.num_bytes += len(found)
        return found

    def readinto(self, room):
        num_bytes = self.file.readinto(room)
        CountedFile.num_bytes += num_bytes
        return num_bytes


def open_counted(path, opened=parts.open_regular):
    return CountedFile(opened(path))


parts.open_regular = open_counted


def train(name, text, optimizer, resume=None, linear=False):
    changes = {"model": toy.linear_float32, "loss": toy.linear_loss} if linear else {}
    job = toy.make_job(
        epochs=6,
        batch_size=4,
        optimizer=getattr(toy, optimizer),
        checkpoint_every="never" if resume else "96",
        keep_checkpoints=99,
        schedule=mt.Decay(every=2, by=0.5),
        data=toy.Memory(window_samples=4),
        **changes,
    )
    CountedFile.num_bytes, run_dir = 0, Path(sys.argv[1]) / name
    mt.train(job, parse(text, "strategy"), run_dir=str(run_dir), quiet=True, resume=resume)
    (run_dir / f"read-{runtime.start().rank}").write_text(str(CountedFile.num_bytes))


run_calls(globals())
