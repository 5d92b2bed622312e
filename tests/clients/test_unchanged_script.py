"""A public script for torchrun that looks at RANK before it makes a group, and that gloo runs on a CPU: Classy Vision's
`classy_train.py`, as its wheel has it, with the project of that wheel's template on smaller images.

The wheel is fetched by `make clients`; nothing of it is part of this repository.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.clients.test_strategies_in_frameworks import note
from tests.ranks import run_plain

OPERATORS = Path(__file__).parent / "programs" / "operators"
FOLDER = os.environ.get("MPITRAIN_UNCHANGED_SCRIPT", "")
SAID = "Done setting up distributed process_group with rank 1, world_size 2"


@pytest.mark.skipif(not FOLDER, reason="Classy Vision's script is not here: make clients")
def test_a_script_for_torchrun_trains_to_the_weights_of_gloo(tmp_path):
    """Not a word of it is changed; `mpitrain launch` has named the ranks before its first line."""
    _make_project(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    ours = [str(Path(sys.executable).with_name("mpitrain")), "launch", "-n", "2"]
    theirs, mine = (
        _train(tmp_path, name, command)
        for name, command in (("gloo", torchrun), ("mpi4py", ["env", "MPITRAIN_REPLACES=gloo", *ours]))
    )
    assert mine.keys() == theirs.keys() and len(mine) > 1
    difference = max(float((mine[name] - theirs[name]).abs().max()) for name in mine)
    note("classy_train.py", "unchanged", 2, "torchrun over gloo", difference)
    assert difference < 1e-6


def _make_project(path):
    package = Path(FOLDER) / "classy_vision"
    shutil.copytree(package / "templates" / "synthetic", path, dirs_exist_ok=True)
    shutil.copy(package / "classy_train.py", path)
    config = json.loads((path / "configs" / "template_config.json").read_text())
    config["num_epochs"], config["optimizer"]["param_schedulers"]["lr"]["values"] = 1, [0.1]
    for part, samples in (("train", 64), ("test", 16)):
        data = config["dataset"][part]
        data |= {"crop_size": 32, "num_samples": samples, "batchsize_per_replica": 8, "num_workers": 1}
        data["transforms"] = [{"name": "generic_image_transform", "transforms": [{"name": "ToTensor"}]}]
    (path / "small.json").write_text(json.dumps(config))


def _train(path, name, command):
    """The weights that it has saved."""
    (path / name).mkdir()
    places = [FOLDER, str(OPERATORS), *filter(None, [os.environ.get("PYTHONPATH")])]
    script = [
        "classy_train.py",
        "--config",
        "small.json",
        "--distributed_backend",
        "ddp",
        "--skip_tensorboard",
    ]
    argv = ["sh", "-c", 'exec "$@" 2>&1', "sh", "env", f"PYTHONPATH={os.pathsep.join(places)}", *command]
    printed = run_plain([*argv, *script, "--checkpoint_folder", str(path / name)], cwd=path, timeout_s=550)
    assert SAID in printed and "Training successful!" in printed, printed
    held = torch.load(path / name / "checkpoint.torch", weights_only=False)
    return held["classy_state_dict"]["base_model"]["model"]["trunk"]
