"""Programs of torchsnapshot and Opacus give gloo's losses (`programs/`); their libraries lie in an environment of their
own, MPITRAIN_MORE_CLIENTS, and are skipped without it (`make clients`)."""

import os

import pytest

from tests.clients.running import farthest, run_program

FOLDER = os.environ.get("MPITRAIN_MORE_CLIENTS", "")


@pytest.mark.skipif(not FOLDER, reason="torchsnapshot and Opacus are not here: make clients")
@pytest.mark.parametrize("program", ["snapshots", "opacus_ddp"])
def test_programs_of_more_libraries(program, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    ours, theirs = (run_program(program, backend, "openmpi")[program] for backend in ("mpi4py", "gloo"))
    assert farthest(ours, theirs) < 1e-5
