"""What a script for torchrun takes for granted: RANK, before it imports anything, and torch's default store, which all
ranks share."""

import os
import subprocess
import sys

import pytest

from mpitrain.system.launched.launch_variables import torchrun_names
from tests.ranks import find_mpi, run_ranks, warm_environment

NAMES = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
# In one piece each: not every launcher keeps the lines of ranks apart.
TELL = f"""
import os
def tell(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
tell(*map(os.environ.get, {NAMES + ("MASTER_ADDR",)}))
"""
DDP = (
    TELL
    + """
import torch.distributed as dist
dist.init_process_group("gloo", init_method="env://")
store = dist.distributed_c10d._get_default_store()
assert store._underlying_non_prefix_store.connected.cache_info().currsize == 0
store.add("count", 1)
dist.barrier()
if dist.get_rank() == 0:
    store.set("key", "hello")
store.wait(["key"])
assert (store.add("count", 0), store.get("key"), store.num_keys() > 1) == (2, b"hello", True)
inner = store._underlying_non_prefix_store.connected()
assert inner.underlying_store.host == "127.0.0.1" and not inner.underlying_store.check(["default_pg/key", "key"])
dist.barrier()
tell(type(dist.group.WORLD).__name__, *map(os.environ.get, ("RANK", "LOCAL_WORLD_SIZE")))
"""
)
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "5"}


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({}, {}),
        ({"RANK": "1", "WORLD_SIZE": "2"}, {}),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "3"},
            {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"},
        ),
        (
            {
                **STEP,
                "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
                "SLURM_NODEID": "2",
                "SLURM_STEP_NUM_NODES": "3",
            },
            {"RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        ),
        # how many on this node nobody says, and there are several
        ({**STEP, "SLURM_STEP_NUM_NODES": "3"}, {"RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "0"}),
    ],
)
def test_every_launcher_says_who_one_is(environ, told):
    assert torchrun_names(environ) == told


def launched(tmp_path, script, **variables):
    (tmp_path / "script.py").write_text(script)
    env = warm_environment({**os.environ, **variables}, tmp_path / "ranks")
    command = [sys.executable, "-m", "mpitrain", "launch", "-n", "2", "script.py"]
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)


def test_a_launched_script_knows_it_from_its_first_line_on(tmp_path):
    """Whatever an outer launch has left; and MASTER_ADDR is nobody's: a second group would meet there."""
    ended = launched(tmp_path, TELL, RANK="7", LOCAL_WORLD_SIZE="9")
    assert sorted(ended.stdout.splitlines()) == ["0 2 0 2 None", "1 2 1 2 None"], ended
    ended = launched(tmp_path, DDP, MPITRAIN_REPLACES="gloo")
    assert sorted(ended.stdout.splitlines())[2:] == ["MpiProcessGroup 0 2", "MpiProcessGroup 1 2"], ended
    assert "made no process group" not in ended.stderr


def test_ranks_that_never_meet_are_told_once(tmp_path):
    ended = launched(tmp_path, "import torch, mpitrain\n")
    assert ended.returncode == 0 and ended.stderr.count("made no process group: has each of them") == 1, ended


@pytest.mark.parametrize(
    ("ending", "doubts"),
    [
        ("", True),
        ("sys.exit(0)", True),
        ("sys.exit()", True),
        ("sys.exit(2)", False),
        ("argparse.ArgumentParser().error('no')", False),
        ("sys.exit('no data')", False),
        ("raise ValueError", False),
        ("import nothing_of_that_name", False),
    ],
)
def test_a_script_that_fails_before_it_could_make_a_group_is_not_asked_for_one(ending, doubts):
    script = f"import argparse, sys\nimport mpitrain\n{ending}\n"
    env = {**os.environ, "RANK": "0", "MPITRAIN_SCRIPT_OF": "2"}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60
    )
    assert ("made no process group" in ended.stderr) == doubts, ended.stderr


def test_under_mpirun_it_is_known_from_torch_on_where_a_backend_is_replaced(tmp_path):
    python = str(find_mpi()[0])
    (tmp_path / "script.py").write_text(DDP)
    run = run_ranks(2, [python, str(tmp_path / "script.py")], env={"MPITRAIN_REPLACES": "gloo"}, warm=False)
    assert [out.splitlines() for out in run.ranks_out] == [
        ["None None None None None", f"MpiProcessGroup {rank} 2"] for rank in range(2)
    ]
