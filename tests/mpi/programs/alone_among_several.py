"""One process whose launcher says that it has started three: each entry in turn, by which one would train alone."""

import contextlib
import io
import os
from pathlib import Path

os.environ["OMPI_COMM_WORLD_SIZE"] = "3"  # MPI has started one

import torch
from mpi4py import MPI

import mpitrain as mt
from mpitrain.cli.main import main
from tests.toy import make_job, perceptron

TOY = str(Path(__file__).parents[2] / "toy.py")
model = perceptron()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
COMMANDS = (
    ["train", TOY],
    ["train", TOY, "--threads", "2"],
    ["sweep", TOY, "--vary", "lr=0.1,0.2"],
    ["predict", "run", "data", "-o", "out.h5"],
    ["ensemble", "run", "-o", "out"],
    ["data", "pack", "in", "out"],
    ["doctor", "--comm"],
    ["doctor", "--gpu-mpi"],
    ["plan", TOY, "--probe", "--workers", "2"],
    ["bench", TOY],
    ["launch", "-n", "2", "train", TOY],
    ["env"],
)
CALLS = {
    "mt.train": lambda: mt.train(make_job()),
    "mt.wrap": lambda: mt.wrap(model, optimizer, mt.AllReduce()),
    "process group": lambda: torch.distributed.init_process_group("mpi4py"),
    "mpi://": lambda: torch.distributed.init_process_group("mpi4py", init_method="mpi://"),
}
for name, call in CALLS.items():
    try:
        call()
    except mt.errors.UsageError as error:
        print(f"{name}: {error}")
for words in COMMANDS:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            code = main(words)
        except SystemExit as error:
            code, text = error.code, f"not understood: {said.getvalue()}"
        else:
            text = said.getvalue().strip()
    option = " --threads" if "--threads" in words else ""
    print(f"{words[0]}{option}: {code} {text}")
print(f"left behind: {sorted(os.listdir())}")
MPI.Finalize()  # nothing of ours has begun, so nobody else does
