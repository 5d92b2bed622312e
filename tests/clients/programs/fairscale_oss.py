"""fairscale's `benchmarks/oss.py`, as its wheel has it, on a small model and images that are made here: its `train` is
started by MPI instead of its own `mp.spawn`, with OSS under DDP or under ShardedDDP, as the command line says. What is
compared are the norms of a parameter, its gradient and a buffer that rank 0 prints at every step, and its losses."""

import argparse
import importlib
import logging
import os
import re
import struct
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from tests.clients.programs.recording import carried_by, keep_group, put

NUMBERS = re.compile(r"(?:param|grad|buffer:?|Loss) ([0-9.e+-]+)")


class Seen(logging.Handler):
    """The numbers of every line, and which backend the group had then."""

    def __init__(self):
        super().__init__()
        self.numbers, self.backend = [], None

    def emit(self, record):
        """Note them."""
        if dist.is_initialized() and not self.backend:
            self.backend = carried_by()
            keep_group()
        if re.match(r"after BW|after update|\nbefore|buffer|Epoch", text := record.getMessage()):
            self.numbers.extend(float(number) for number in NUMBERS.findall(text))


def images(folder):
    """Files as MNIST has them, which torchvision reads if they are there."""
    raw = Path(folder) / "MNIST" / "raw"
    raw.mkdir(parents=True)
    torch.manual_seed(3)
    for part, samples in (("train", 64), ("t10k", 8)):
        labels = torch.randint(0, 10, (samples,), dtype=torch.uint8)
        pixels = (torch.rand(samples, 28, 28) * 128).to(torch.uint8) + labels[:, None, None] * 12
        head = struct.pack(">iiii", 2051, samples, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(head + pixels.numpy().tobytes())
        head = struct.pack(">ii", 2049, samples)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(head + labels.numpy().tobytes())


def run(way, rank, backend):
    """What was seen of one way to optimize."""
    seen = Seen()
    logging.getLogger().addHandler(seen)
    args = argparse.Namespace(
        world_size=2, epochs=2, batch_size=8, cpu=True, model="shufflenet_v2_x0_5", debug=True, amp=False,
        profile=False, multi_tensor_optim=False, optim_type=way,
    )  # fmt: skip
    oss.train(rank, args, backend, way, False)
    logging.getLogger().removeHandler(seen)
    return seen


logging.basicConfig(level=logging.DEBUG, handlers=[logging.NullHandler()])
backend, rank = sys.argv[1], int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
tempfile.tempdir = tempfile.mkdtemp()  # where the program looks for images
images(tempfile.tempdir)
sys.path.append(importlib.import_module("benchmarks").__path__[0])  # where it is run as a script
oss = importlib.import_module("benchmarks.oss")
seen = run(oss.OptimType(sys.argv[2]), rank, backend)
put("fairscale_oss", seen.numbers, seen.backend)
