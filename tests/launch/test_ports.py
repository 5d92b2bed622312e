"""On one node no rank can be reached from another host, and a stranger's bytes end no job."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from mpitrain.doctor.listening import listening
from mpitrain.launch.command import Asked, launch_command
from mpitrain.launch.discover import Launcher
from mpitrain.system.launched.transports import closed, is_on_one_node
from tests.ranks import ROOT, find_mpi, warm_environment

PROGRAM = Path(__file__).parent / "programs/listens.py"
BYTES = (b"GET / HTTP/1.0\r\n\r\n", b"\0" * 4096, b"\xff" * 65536, bytes(range(256)) * 16, b"")


@pytest.mark.parametrize(
    ("environ", "one"),
    [
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "4"}, True),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "4"}, False),
        ({"MPI_LOCALNRANKS": "4", "PMI_SIZE": "4"}, True),
        ({"PMI_SIZE": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2"}, False),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1"}, True),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2"}, False),
        ({}, False),
    ],
)
def test_ranks_of_one_node_are_known_as_such(environ: dict[str, str], one: bool) -> None:
    assert is_on_one_node(environ) == one


@pytest.mark.parametrize(
    ("environ", "left_alone"),
    [
        ({}, set()),
        ({"OMPI_MCA_btl": "self,tcp"}, {"OMPI_MCA_btl"}),
        ({"OMPI_MCA_btl_tcp_if_include": "eth0"}, {"OMPI_MCA_btl"}),
        ({"UCX_TLS": "tcp,self"}, {"UCX_NET_DEVICES"}),
        ({"FI_PROVIDER": "tcp"}, {"FI_TCP_IFACE"}),
    ],
)
def test_a_transport_that_the_user_names_is_taken(environ: dict[str, str], left_alone: set[str]) -> None:
    assert set(closed(environ)) == {"OMPI_MCA_btl", "UCX_NET_DEVICES", "FI_TCP_IFACE"} - left_alone


def test_ucx_of_hydras_ranks_on_one_node_does_without_tcp() -> None:
    assert closed({"MPI_LOCALNRANKS": "3"})["UCX_TLS"] == "^tcp"
    assert "UCX_TLS" not in {**closed({"MPI_LOCALNRANKS": "3", "UCX_NET_DEVICES": "eth0"}), **closed({})}


@pytest.mark.parametrize(
    ("flavour", "options", "said"),
    [
        ("openmpi", {}, "^ofi,tcp"),
        ("openmpi", {"interface": "eth0"}, "^ofi"),
        ("openmpi", {"host_args": ("--mca", "btl_tcp_if_include", "eth0")}, "^ofi"),
        ("openmpi", {"host_args": ("--host", "a,b"), "interface": "ib0"}, "--prtemca prte_if_include ib0"),
        ("openmpi", {"host_args": ("--host", "a,b"), "interface": "ib0"}, "-x OMPI_MCA_btl_tcp_if_include"),
        ("mpich", {"interface": "ib0"}, "-iface ib0"),
        ("mpich", {}, "UCX_NET_DEVICES=lo"),
    ],
)
def test_a_launch_names_the_network(flavour: str, options: dict, said: str) -> None:
    launcher = Launcher(flavour, "mpirun", flavour)
    command, env = launch_command(Asked(launcher, 2, ["x"], num_cores=2, environ={}, **options))
    told = " ".join([*(f"{name}={value}" for name, value in env.items()), *command]).split(" ")
    words = said.split()
    assert (
        any(told[at : at + len(words)] == words for at in range(len(told))) or env.get("OMPI_MCA_btl") == said
    )


def test_where_a_process_listens_can_be_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as here:
        assert f"rank 127.0.0.1:{here.getsockname()[1]}" in listening()


@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.extended)])
def test_a_strangers_bytes_end_no_job_on_one_node(tmp_path: Path, mpi: str) -> None:
    python, _ = find_mpi(mpi)
    (ranks := tmp_path / "ranks").mkdir()
    env = warm_environment({**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, ranks, mpi)
    del env["OMPI_MCA_btl"]  # which all other tests name
    command = [str(python), "-m", "mpitrain", "launch", "-n", "2", str(PROGRAM), str(tmp_path)]
    with open(tmp_path / "out", "wb") as out:
        run = subprocess.Popen(command, env=env, stdout=out, stderr=out)
    paths = [tmp_path / f"listens-{rank}" for rank in range(2)]
    try:
        while not all(path.exists() for path in paths):
            assert run.poll() is None, (tmp_path / "out").read_text()
            time.sleep(0.02)
        places = {tuple(line.split()) for path in paths for line in path.read_text().splitlines()}
        of_ranks = [place for who, place in places if who == "rank"]
        if mpi == "openmpi":
            assert of_ranks == []
        for _, place in places:
            send(place)
    finally:
        (tmp_path / "go").touch()
        code = run.wait(120)
    assert code == 0 and (tmp_path / "out").read_text().count("ends well") == 2


def send(place: str) -> None:
    host, port = place.rsplit(":", 1)
    host = {"0.0.0.0": "127.0.0.1", "[::]": "::1"}.get(host, host.strip("[]"))
    for data in BYTES:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as stranger:
            stranger.sendall(data)
