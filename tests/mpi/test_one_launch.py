"""One launch is one job: no entry trains alone where its launcher has started several processes."""

import sys
from pathlib import Path

from tests.ranks import find_mpi, needs_open_mpi, run_plain, run_ranks

PROGRAM = Path(__file__).parent / "programs/alone_among_several.py"
REFUSED = "MPI knows one rank and the launcher 3 (OMPI_COMM_WORLD_SIZE)"
OTHERWISE = {
    "train --threads": "this launch has 3 ranks",
    "bench": "cannot itself be one",
    "launch": "cannot itself be one",
}


def test_every_entry_refuses_in_turn_and_leaves_nothing_behind(tmp_path):
    needs_open_mpi("pretends to be of Open MPI's launcher")
    said = run_ranks(1, PROGRAM, cwd=tmp_path).check().stdout.splitlines()
    assert len(said) == 17 and said.pop() == "left behind: []"
    for line in said:
        name = line.partition(":")[0]
        assert OTHERWISE.get(name, REFUSED) in line, line


def test_a_launcher_of_another_mpi_is_noticed_by_what_it_says(tmp_path):
    needs_open_mpi("takes MPICH's launcher for another one's")
    _, mpiexec = find_mpi("mpich")
    command = [str(mpiexec), "-n", "2", sys.executable, "-m", "mpitrain", "doctor", "--comm"]
    run_plain(command, cwd=tmp_path, code=2)
