"""Programs that know nothing of this package give gloo's losses (`programs/`): first those that need torch alone.

Those of other libraries need an environment of their own (`make clients`), and are skipped without it.
"""

import importlib.util

import pytest

from tests.clients.running import farthest, run_program

OF_TORCH = ["zero_optimizer", "post_localsgd", "async_checkpoint", "metrics"]
# program -> its library
FOREIGN = {
    "lightning_trainer": "lightning",
    "fabric": "lightning",
    "accelerate_loop": "accelerate",
    "hf_trainer": "transformers",
    "heat_beside": "heat",
}
BY_ENVIRONMENT = ("accelerate_loop", "hf_trainer")  # which also take the names of torch's own backends only


@pytest.fixture(scope="module")
def over_gloo():
    """Over gloo only the launcher is an MPI's, so both are compared with one launch."""
    return run_program("torch_clients", "gloo", "openmpi")


@pytest.fixture(scope="module", params=["openmpi", pytest.param("mpich", marks=pytest.mark.extended)])
def curves(request, over_gloo):
    """(ours, gloo's) of all programs of torch."""
    return [run_program("torch_clients", "mpi4py", request.param), over_gloo]


@pytest.mark.extended  # with its own scripts over both: tests/mpi/test_examples.py
@pytest.mark.parametrize("program", OF_TORCH)
def test_torchs_own(curves, program):
    if program == "metrics":
        pytest.importorskip("torchmetrics")
    ours, theirs = curves
    assert farthest(ours[program], theirs[program]) < 1e-5


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
@pytest.mark.parametrize("program", FOREIGN)
def test_other_libraries(program, mpi):
    if importlib.util.find_spec(FOREIGN[program]) is None:
        pytest.skip(f"{FOREIGN[program]} is not installed: make clients")
    special = program in BY_ENVIRONMENT
    ours, theirs = (
        run_program(program, backend, mpi, asks_environment=special, replaces=special)[program]
        for backend in ("mpi4py", "gloo")
    )
    assert farthest(ours, theirs) < 1e-5
