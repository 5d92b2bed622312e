"""`doctor --comm` on three emulated hosts, one of them behind a slow link; and `--gpu-mpi` where there is no GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpitrain.system.launched.launch_variables import node_name
from mpitrain.values import parse
from mpitrain.virtual import MeasuredNetwork
from tests.ranks import find_mpi, is_intel, run_plain, run_ranks

PROGRAMS = Path(__file__).parent / "programs"

RATES = ("400mbit", "400mbit", "100mbit")
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


@pytest.mark.extended
def test_a_node_behind_a_slow_link_is_named(hosts: list[str], tmp_path: Path) -> None:
    failing = tmp_path / "failing_nodes.txt"
    command = [str(find_mpi()[0]), "-m", "mpitrain", "doctor", "--comm", "--failing", str(failing)]
    command += ["--json", str(tmp_path / "comm.json")]
    told = run_plain([*hosts, "-n", "3", *command], code=4)
    assert "unfit: drh2: every link to it is slow, the best one" in told
    judged = "\n".join(line for line in told.splitlines() if " listens: " not in line)
    assert "drh0" not in judged and "3 link(s) between 3 nodes: median" in judged  # only what stands out
    assert failing.read_text() == "drh2\n"
    found = json.loads((tmp_path / "comm.json").read_text())
    together, pairs = found["all_nodes_at_once"], found["between_nodes"]
    # each host sends to the next one, and waits for the one before: the slow link holds up all of them
    assert 0 < together["bytes_per_s"] < 1.2 * min(row["bytes_per_s"] for row in pairs)
    assert (
        together["latency_s"] > 0 and 32 << 10 < found["eager_bytes"] < 64 << 10
    )  # 64 KiB over TCP, with a header


@pytest.mark.extended
def test_a_plan_in_a_launch_measures_the_link_and_is_printed_once(hosts: list[str], tmp_path: Path) -> None:
    job = Path(__file__).resolve().parents[2] / "jobs" / "digits.py"
    command = [
        str(find_mpi()[0]),
        "-m",
        "mpitrain",
        "plan",
        str(job),
        "--synthetic",
        "--workers",
        "1,2",
        "--probe",
    ]
    command += ["--probe-s", "0.1", "--json", str(tmp_path / "plan.json")]
    told = run_plain([*hosts, "-n", "2", *command])
    law = parse(json.loads((tmp_path / "plan.json").read_text())["probe"]["network"], "network")
    assert 0.2 < law.gbit_per_s < 0.5 and law.ranks_per_node == 1  # the first two hosts have 400 Mbit/s
    assert 32 << 10 < law.eager_bytes < 64 << 10
    assert told.count("what holds it back") == 1, told


def test_on_one_node_nobody_is_slow_and_no_gpu_is_no_canary(tmp_path: Path) -> None:
    run = run_ranks(3, PROGRAMS / "wrong_sums.py", cwd=tmp_path).check()
    import torch

    law = MeasuredNetwork(str(tmp_path / "comm.json"))
    found = json.loads((tmp_path / "comm.json").read_text())
    assert [(row["a"], row["b"]) for row in found["within_nodes"]] == [(0, 1), (0, 2), (1, 2)]
    assert found["between_nodes"] == [] and found["nodes"] == [0, 0, 0] and law.nodes(9) == (0,) * 9
    assert law.cluster.local_latency_s == sorted(row["latency_s"] for row in found["within_nodes"])[1]
    assert (
        law.cluster.local_gbit_per_s
        == sorted(row["bytes_per_s"] for row in found["within_nodes"])[1] * 8 / 1e9
    )
    assert parse(str(law), "network") == law
    # Open MPI has a limit, whatever carries, and so has MPICH; Intel MPI's receivers take in any message within a node
    assert (0 < law.eager_bytes < 1 << 20) != is_intel() and "all_nodes_at_once" not in found

    assert "3 link(s) within 1 node(s): median" in run.ranks_out[0] and "ranks 0, 2" not in run.ranks_out[0]
    said = run.ranks_out[0][run.ranks_out[0].index("codes ") :]
    # 0: all is well; 1: rank 1's small message to rank 2 holds zeros; 2: rank 2's large one is never written to;
    # 3: rank 0 gets no small sum, and rank 2 sends zeros to rank 0
    assert [line for line in said.splitlines() if "fit" in line or "rank" in line] == [
        "fit: MPITRAIN_GPU_BUFFERS=on may be set",
        f"unfit: rank 2 on {node_name()}: 1024 bytes from rank 1 arrived changed",
        "unfit",
        f"unfit: rank 2 on {node_name()}: 8388608 bytes from rank 1 arrived changed",
        "unfit",
        f"unfit: rank 0 on {node_name()}: 1024 bytes from rank 2 arrived changed",
        f"unfit: rank 0 on {node_name()}: an allreduce of 1024 bytes is wrong",
        "unfit",
    ]
    for out in run.ranks_out:
        told = [line for line in out.splitlines() if line.startswith("canary ")]
        assert told == [f"canary {code} of 8, waited {4 * (i + 1)}" for i, code in enumerate((0, 4, 4, 4))]
    if not torch.cuda.is_available():
        assert all("codes 0 4" in out for out in run.ranks_out) and "no accelerator on" in run.ranks_out[0]


def test_a_suspicion_is_measured_again_before_anybody_is_accused(tmp_path: Path) -> None:
    run = run_ranks(4, PROGRAMS / "suspicions.py", cwd=tmp_path).check()
    said = [line for line in run.ranks_out[0].splitlines() if "slow" in line]
    assert said == [
        "unfit: the link n0 - n1 is slow, 10.0 us and 100 MB/s, and both nodes have better ones",
        "unfit: n3: every link to it is slow, the best one 10.0 us and 100 MB/s",
    ]
    counts = [line.split()[1:] for line in run.ranks_out[0].splitlines() if line.startswith("measured")]
    assert counts == [
        ["0", "01:1", "02:1", "03:1"],
        ["0", "01:2", "02:1", "03:1"],  # cleared by the first measurement that is as good as the others
        ["4", "01:3", "02:1", "03:1"],
        ["4", "01:1", "02:1", "03:3"],
        ["0", "01:1", "02:1", "03:2"],
    ]
