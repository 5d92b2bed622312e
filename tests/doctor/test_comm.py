"""`doctor --comm` on three emulated hosts, one of them behind a slow link; and `--gpu-mpi` where there is no GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import find_mpi, run_plain, run_ranks

RATES = ("400mbit", "400mbit", "20mbit")
_HOST = """\
ip netns add drh{i}
ip link add drv{i} type veth peer name eth0 netns drh{i}
ip link set drv{i} master drbr up
ip -n drh{i} addr add 10.79.0.{n}/24 dev eth0
ip -n drh{i} link set eth0 up
ip -n drh{i} link set lo up
ip netns exec drh{i} tc qdisc add dev eth0 root tbf rate {rate} burst 64kb latency 100ms
tc qdisc add dev drv{i} root tbf rate {rate} burst 64kb latency 100ms
"""
_AGENT = """\
#!/bin/bash
while [[ $1 == -* ]]; do shift; done
i=$((${1##*.} - 10)); shift
exec ip netns exec "drh$i" unshare --uts bash -c "hostname drh$i; $*"
"""


def _down() -> None:
    for i in range(len(RATES)):
        for command in (f"ip link del drv{i}", f"ip netns del drh{i}"):
            subprocess.run(command.split(), capture_output=True)
    subprocess.run(["ip", "link", "del", "drbr"], capture_output=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[str]]:
    """What comes before a command to run it as one rank on each host."""
    if os.geteuid() != 0 or not shutil.which("tc") or not shutil.which("ip"):
        pytest.skip("emulated hosts need root, ip and tc: apt-get install iproute2")
    _down()
    script = "set -e\nip link add drbr type bridge\nip link set drbr up\n" + "".join(
        _HOST.format(i=i, n=10 + i, rate=rate) for i, rate in enumerate(RATES)
    )
    try:
        made = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"no network namespaces here: {made.stderr.strip()[-100:]}")
        agent = tmp_path / "agent"
        agent.write_text(_AGENT)
        agent.chmod(0o755)
        mpirun = [str(find_mpi()[1]), "--mca", "plm_ssh_agent", str(agent), "--mca", "pml", "ob1"]
        mpirun += ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "eth0", "--bind-to", "none"]
        mpirun += ["-x", "PYTHONPATH", "--host", ",".join(f"10.79.0.{10 + i}:1" for i in range(len(RATES)))]
        yield [
            "ip",
            "netns",
            "exec",
            "drh0",
            "unshare",
            "--uts",
            "bash",
            "-c",
            'hostname drh0; exec "$@"',
            "-",
            *mpirun,
        ]
    finally:
        _down()


def test_a_node_behind_a_slow_link_is_named(hosts: list[str], tmp_path: Path) -> None:
    failing = tmp_path / "failing_nodes.txt"
    command = [str(find_mpi()[0]), "-m", "mpitrain", "doctor", "--comm", "--failing", str(failing)]
    told = run_plain([*hosts, "-n", "3", *command], code=4)
    assert "unfit: drh2: every link to it is slow" in told and "drh0 - drh1" in told
    assert failing.read_text() == "drh2\n"


def test_on_one_node_nobody_is_slow_and_no_gpu_is_no_canary(tmp_path: Path) -> None:
    program = "\n".join(
        [
            "from mpitrain.doctor import canary, pairs",
            "from mpitrain.mpi.runtime import start",
            "runtime = start()",
            "comm, gpu = pairs.run_comm(runtime, None), canary.run_canary(runtime)",
            "print(f'codes {comm} {gpu}')",
        ]
    )
    run = run_ranks(3, program).check()
    import torch

    assert "ranks 0, 2" in run.ranks_out[0] and "MB/s" in run.ranks_out[0]
    if not torch.cuda.is_available():
        assert all("codes 0 4" in out for out in run.ranks_out) and "no CUDA device on" in run.ranks_out[0]
