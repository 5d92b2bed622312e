"""What the template for several nodes runs on 1,280 of them, with programs of Slurm's names that only note it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

from mpitrain.slurm import Script, render, render_site

NODES = [f"n{index}" for index in range(1, 1281)]
NOTE = '#!/bin/bash\nprintf "%q " "${0##*/}" "$@" >>calls\necho >>calls\n'
PROGRAMS = {
    "sbcast": NOTE,
    # a report of every node but n7, which reports when it is asked again; and what ranks print
    "srun": NOTE
    + """
for word in "$@"; do
    case $word in
    --nodelist=*) hosts=${word#*=} ;;
    --output=*) out=${word#*=} ;;
    doctor) for host in ${hosts//,/ }; do [[ $host == n7 && $hosts == *,* ]] || touch "run/doctor/$host.json"; done ;;
    train) echo "FOM of the ranks" >>"${out//[%]N/n1}" ;;
    esac
done
""",
    "scontrol": '#!/bin/bash\nif [[ $2 == hostnames ]]; then printf "n%d\\n" {1..1280}; fi\n',
    "mpitrain": """#!/bin/bash
case $1 in
doctor) : >run/failing_nodes.txt ;;
train) for node in {1..1280}; do for _ in 1 2 3 4; do echo "n$node"; done; done >run/hosts ;;
esac
""",
}


def site_with_packages() -> str:
    """The site file with the lines that send packages to the nodes."""
    text = render_site()
    lines = re.search(r"^# PACKAGES=.*?^# export PYTHONPATH=\$PACKAGES.*?$", text, re.M | re.S)
    assert lines
    return text.replace(lines[0], re.sub("^# ", "", lines[0], flags=re.M))


def test_1280_nodes_are_asked_at_once_and_print_into_a_file_each(tmp_path: Path) -> None:
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "site.sh").write_text(site_with_packages())
    (tmp_path / "script").write_text(render(Script("multi-node", job="job.py", nodes=1280)))
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MPITRAIN_SITE": "site.sh", "RUN_DIR": "run"}
    env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "many", "SLURM_JOB_NODELIST": "n[1-1280]"}
    env |= {"SLURM_JOB_NUM_NODES": "1280", "SLURM_CPUS_ON_NODE": "64", "SLURM_GPUS_PER_NODE": "4"}
    run = subprocess.run(
        ["bash", "script"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr
    assert "FOM of the ranks" in run.stdout.splitlines()
    calls = [shlex.split(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert [call[0] for call in calls] == ["sbcast", *["srun"] * 4]
    sent, unpacked, asked, again, ranks = calls
    assert sent == ["sbcast", "--force", "packages.tar", "/tmp/packages-7.tar"]
    assert {"--nodes=1280", "--ntasks=1280", "--ntasks-per-node=1"} <= set(unpacked)
    assert unpacked[-1] == "/tmp/packages-7"
    assert {"--nodes=1280", "--ntasks=1280", "--no-kill", f"--nodelist={','.join(NODES)}"} <= set(asked)
    assert {"--nodes=1", "--ntasks=1", "--nodelist=n7"} <= set(again)
    assert {"--nodes=1280", "--ntasks=5120", "--distribution=arbitrary"} <= set(ranks)
    assert {"--output=run/output/%N.txt", "--open-mode=append"} <= set(ranks) and "--unbuffered" not in ranks
    assert (tmp_path / "run" / "output" / "n1.txt").exists()
