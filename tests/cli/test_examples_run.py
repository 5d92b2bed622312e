"""Every example that a help text prints is run: as it is, or with `--dry-run` where its command has that.

The folder holds what the examples name. `srun` stands for two ranks on this machine, or for one process where it is
told `--mpi=none`; `sbatch` reads the script that it is given and queues nothing.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil

import pytest

from mpitrain.cli import main as cli
from tests.cli.test_cli import COMMANDS
from tests.documented import Folder

SRUN = """\
#!/bin/bash
[[ $* == --mpi=list ]] && { echo pmix; exit; }
ranks=2
while [[ $1 == -* ]]; do [[ $1 == --mpi=none ]] && ranks=1; shift; done
((ranks == 1)) && exec "$@"
exec mpirun -n $ranks "$@"
"""
SBATCH = """\
#!/bin/bash
bash -n -- "${@: -1}" 2>/dev/null || bash -n
echo 1
"""
LOOP = """\
import argparse
import torch
import mpitrain as mt

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, required=True)
size = parser.parse_args().batch_size
model = torch.nn.Linear(2, 1)
model, optimizer = mt.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), mt.AllReduce())
for x, y in [(torch.randn(size, 2), torch.randn(size, 1))] * 4:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
mt.finish()
"""
MACHINE = 'nodes = 4\nranks_per_node = 2\nmemory_gib = 64\nnetwork = "gbe1()"\n'
RUNS = {"mine": "allreduce()", "sync": "sync()", "async": "async()", "localsgd": "localsgd()"}


def examples() -> list[str]:
    """Every example once, without the remark after it; not those that take minutes: `search/test_bench.py`,
    `planning/test_plan.py`."""
    found: dict[str, None] = {}
    for words in COMMANDS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit):
            cli.main([*words, "--help"])
        text = re.sub(r" *\\\n *", " ", printed.getvalue()).partition("examples:\n")[2]
        for line in text.splitlines():
            if not line.startswith("  "):
                break
            found[re.sub(r"\s{4,}.*", "", line.strip())] = None
    return [example for example in found if not re.search(r"mpitrain bench | --train 4$", example)]


def as_run(example: str) -> str:
    """The example, dry where it can be."""
    words = shlex.split(example.partition(" > ")[0])
    words = words[words.index("mpitrain") + 1 :]
    arguments = cli.parse(words)
    asked = arguments.program if words[0] == "launch" else words
    dry = asked[0] in ("train", "sweep") and "--run-dir" not in asked and "--dry-run" not in words
    return example + " --dry-run" if dry else example


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    printed = Folder(tmp_path_factory.mktemp("examples"))
    here = printed.folder
    printed.env |= {"TMPDIR": str(here / "node"), "MPITRAIN_SITE": str(here / "slurm" / "site.sh")}
    for name, script in (("srun", SRUN), ("sbatch", SBATCH)):
        (here / "commands" / name).write_text(script)
        (here / "commands" / name).chmod(0o755)
    for folder in ("node", "DIR", "others"):
        (here / folder).mkdir()
    (here / "my_loop.py").write_text(LOOP)
    (here / "cluster.toml").write_text(MACHINE)
    (here / "hosts").write_text("localhost slots=8\n")
    (here / "sweep.txt").write_text("--lr 0.1\n--lr 0.2\n")
    (here / "table.csv").write_text("width,height,label\n" + "0.5,0.25,1\n" * 20)
    for copy in ("big", "new"):
        shutil.copytree(here / "data" / "digits", here / "data" / copy)
    shutil.copy(here / "data" / "digits" / "train-00000.h5", here / "others" / "a.h5")
    for name, strategy in RUNS.items():
        train = f"mpitrain train jobs/digits.py --threads 3 --epochs 2 --strategy '{strategy}' --run-dir runs/{name}"
        printed.run(f"{train} || [ $? = 3 ]")  # below its target: that takes more epochs
    shutil.copytree(here / "runs" / "async", here / "runs" / "digits-20261121-024707")
    shutil.copytree(here / "runs" / "mine", here / "runs" / "mpitrain-1")
    (here / "runs" / "mpitrain-1" / "REQUEUE").touch()
    printed.run("mpitrain ensemble runs/sync runs/localsgd -o ensembles/best")
    printed.run("mpitrain sweep jobs/digits.py --epochs 1 --vary lr=0.05,0.1 --seeds 2 --run-dir runs/first")
    shutil.copytree(here / "runs" / "first", here / "runs" / "sweep")
    for one in ("a", "b", "c", "yesterday", "today", "fine-1", "fine-2"):
        shutil.copytree(here / "runs" / "mine", here / "runs" / one)
    shutil.copy(here / "runs" / "mine" / "result.json", here / "baseline.json")
    for node in ("n1", "n2", "n3"):
        printed.run(f"SLURMD_NODENAME={node} mpitrain doctor --node --report DIR || true")
    return printed


@pytest.mark.extended
@pytest.mark.parametrize("example", examples(), ids=str)
def test_every_example_of_a_help_text_runs(printed: Folder, example: str) -> None:
    command = as_run(example)
    if command == "mpitrain slurm init":
        command = f"mkdir empty && cd empty && {command}"
    if "doctor --site slurm/site.sh" in command:  # which other examples write
        command = f"mpitrain slurm site > slurm/site.sh && {command}"
    if " simulate " in command:
        command += " || [ $? = 3 ]"  # with 16 workers the job stays below its target, as the figures say
    printed.run(command)
