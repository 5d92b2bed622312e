"""What keeps the word of a death from Slurm, without Slurm: the library in place of a function of PMIx."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

ASKED = """
import ctypes, os
from mpitrain.mpi.faults import under_slurm
under_slurm.prepare()
print(os.environ["OMPI_MCA_mpi_ft_enable"], os.environ["OMPI_MCA_pml"], repr(under_slurm.why_not()))
print(ctypes.CDLL(None).PMIx_Notify_event(-1, None, 0, None, 0, None, None))
"""


def asked(before: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", before + ASKED], capture_output=True, text=True, env=env)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_word_goes_nowhere_and_says_that_it_arrived() -> None:
    run = asked(PATH="/usr/bin:/bin", OMPI_MCA_pml="mine")
    assert run.stdout.splitlines() == ["1 mine ''", "0"], run.stderr


def test_without_a_compiler_the_reason_is_told_and_nothing_is_raised() -> None:
    for compiler, told in (("/no/such/cc -m64", "No such file"), ("/bin/false", "exit code 1")):
        run = asked(CC=compiler)
        first = run.stdout.splitlines()[0]
        assert told in first and compiler.split()[0] in first and "AttributeError" in run.stderr


def test_a_program_that_has_loaded_mpi_before_is_too_late() -> None:
    run = asked("import sys; sys.modules['mpi4py.MPI'] = None\n")
    assert "imports mpi4py.MPI before mpitrain" in run.stdout.splitlines()[0]
