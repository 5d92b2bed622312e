"""Ten programs that know nothing of this package give gloo's numbers, each from an environment of its own.

The environments (`environments/`) are folders in the one that MPITRAIN_MORE_CLIENTS names, and go before that of the
tests; without them the programs are skipped (`make clients`).

Two are those of the registry, started by MPI where they start processes themselves: what they train is theirs to the
last line. The others are as their libraries' documentation shows them, for those have their programs in repositories
only.
"""

import os
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.clients.running import farthest, run_program
from tests.clients.test_strategies_in_frameworks import note
from tests.clients.test_unchanged_script import OPERATORS  # of torchvision

FOLDER = os.environ.get("MPITRAIN_MORE_CLIENTS", "")
OURS, THEIRS = "as documented", "unchanged"
# Two ranks add up the same two numbers in either order, so these are gloo's to the bit so far; an order of more
# summands may change the last ones.
TOLERANCE = 1e-5


class Program(NamedTuple):
    """`library` names its environment. `replaces`: it takes the names of torch's own backends only, and looks for ranks
    in the environment."""

    library: str
    name: str
    arguments: tuple[str, ...] = ()
    whose: str = OURS
    ranks: int = 2
    replaces: bool = False


TEN = [
    Program("deepspeed", "deepspeed_zero"),
    Program("fairscale", "fairscale_oss", ("oss_ddp",), THEIRS),
    Program("fairscale", "fairscale_oss", ("oss_sharded_ddp",), THEIRS),
    Program("hydragnn", "hydragnn_optimizer", whose=THEIRS),
    Program("ignite", "ignite_parallel", replaces=True),
    Program("opacus", "opacus_ddp"),
    Program("propulate", "propulate_groups", ranks=4),
    Program("pytorch_metric_learning", "metric_learning"),
    Program("streaming", "streaming_shards", replaces=True),
    Program("torch_geometric", "pyg_graphs"),
    Program("torchsnapshot", "snapshots"),
]


@pytest.mark.skipif(not FOLDER, reason="the programs' environments are not here: make clients")
@pytest.mark.parametrize("program", TEN, ids=lambda program: " ".join([program.name, *program.arguments]))
def test_has_the_numbers_of_gloo(program, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(FOLDER) / program.library), str(OPERATORS)]))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))  # what DeepSpeed compiles when it starts
    ours, theirs = (
        run_program(
            program.name, backend, "openmpi", arguments=program.arguments, ranks=program.ranks, warm=False,
            asks_environment=program.replaces, replaces=program.replaces, timeout_s=500,
        )[program.name]
        for backend in ("mpi4py", "gloo")
    )  # fmt: skip
    difference = farthest(ours, theirs)
    note(program.library, " ".join([program.whose, *program.arguments]), program.ranks, "gloo", difference)
    assert difference < TOLERANCE
