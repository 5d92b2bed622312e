"""The scripts for strangers: over the MPI that started them they learn what they learn over gloo, and what is new in
them is an import and one word."""

import contextlib
import re
import socket

import pytest

from tests.mpi.cases import launch_program
from tests.ranks import ROOT
from tests.sampling import asked_for, sampled

NAMES = ["ddp", "fsdp2"]
PARAMETERS = sampled(NAMES, ["ddp"])


@pytest.fixture(scope="module")
def said(request):
    asked = [name for name in NAMES if name in asked_for(request, "name")]
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in asked]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        ports = [f"{name}={probe.getsockname()[1]}" for name, probe in zip(asked, probes)]
    run = launch_program(2, "scripts_over_both", *ports, timeout_s=200).check()
    return dict(re.findall(r"^(\w+ \w+) accuracy (0\.\d+)", run.ranks_out[0], re.MULTILINE))


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_same_script_learns_the_same_over_mpi_and_gloo(said, name):
    assert float(said[f"{name} mpi4py"]) == pytest.approx(float(said[f"{name} gloo"]), abs=0.004)
    assert float(said[f"{name} mpi4py"]) >= 0.95


@pytest.mark.parametrize("name", PARAMETERS)
def test_one_word_is_new(name):
    code = (ROOT / "jobs" / "scripts" / f"{name}.py").read_text().split('"""')[2]
    assert re.findall(r".*mpi.*", code) == ['dist.init_process_group("mpi4py")']
