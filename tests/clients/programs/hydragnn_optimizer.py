"""HydraGNN's own test of its optimizers, as its wheel has it (`tests/test_optimizer.py`, whose inputs are not there):
files of atoms that rank 0 reads and serializes, divided between all ranks, trained on by DDP with and without
ZeroRedundancyOptimizer. HYDRAGNN_BACKEND names the backend; what is compared are the weights that it saves."""

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

import ase
import numpy as np
import torch
import torch.distributed as dist
from ase.io.cfg import write_cfg

WAYS = [("AdamW", False), ("AdamW", True), ("SGD", True)]  # optimizer, whether its states are divided
ARCHITECTURE = {
    "model_type": "PNA", "radius": 2.5, "max_neighbours": 100, "periodic_boundary_conditions": True, "hidden_dim": 8,
    "num_conv_layers": 2, "task_weights": [1.0],
    "output_heads": {
        "graph": {"num_sharedlayers": 2, "dim_sharedlayers": 4, "num_headlayers": 2, "dim_headlayers": [10, 10]}
    },
}  # fmt: skip
CONFIG = {
    "Verbosity": {"level": 2},
    "Dataset": {
        "name": "unit_test", "format": "CFG", "compositional_stratified_splitting": False,
        "rotational_invariance": False, "path": {"total": "dataset/unit_test"},
        "node_features": {"name": ["number", "mass", "charge"], "dim": [1, 1, 1], "column_index": [0, 1, 2]},
        "graph_features": {"name": ["bulk"], "dim": [1], "column_index": [0]},
    },
    "NeuralNetwork": {
        "Architecture": ARCHITECTURE,
        "Variables_of_interest": {
            "input_node_features": [0], "output_names": ["bulk"], "output_index": [0], "type": ["graph"],
            "denormalize_output": False,
        },
        "Training": {
            "num_epoch": 2, "perc_train": 0.7, "loss_function_type": "mse", "batch_size": 32,
            "Optimizer": {"type": "AdamW", "use_zero_redundancy": False, "learning_rate": 0.02},
        },
    },
    "Visualization": {"create_plots": False, "plot_init_solution": False, "plot_hist_solution": False},
}  # fmt: skip


def write_atoms(folder):
    """Crystals of three metals, and a number that depends on them."""
    numbers = np.random.default_rng(3)
    grid = np.stack(np.meshgrid(*[np.arange(3.0)] * 3), -1).reshape(-1, 3) * 2
    folder.mkdir(parents=True)
    for name in range(60):
        kinds = numbers.choice(["Fe", "Ni", "Co"], len(grid))
        atoms = ase.Atoms(
            kinds, positions=grid + numbers.uniform(-0.15, 0.15, grid.shape), cell=[6] * 3, pbc=True
        )
        charge = numbers.normal(size=len(grid))
        for array, values in (("c_peratom", charge), ("fx", charge), ("fy", charge), ("fz", charge)):
            atoms.set_array(array, values)
        write_cfg(str(folder / f"{name}.cfg"), atoms)
        (folder / f"{name}.bulk").write_text(f"{charge.sum() + (kinds == 'Fe').sum()}\n")


def train(kind, divided):
    """The sizes of the weights that it has saved."""
    optimizers.unittest_optimizers(kind, divided, "ci.json")
    dist.barrier()
    (path,) = Path("logs").glob("*/*.pk")
    weights = torch.load(path, weights_only=False)["model_state_dict"]
    return [size for value in weights.values() if (size := float(value.double().abs().sum()))]


backend = sys.argv[1]
os.environ["HYDRAGNN_BACKEND"] = backend
hydragnn = importlib.import_module("hydragnn")
_, rank = hydragnn.utils.setup_ddp()
assert dist.get_backend() == backend and dist.get_world_size() == 2
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
os.chdir(folder[0])
if rank == 0:
    Path("tests/inputs").mkdir(parents=True)
    Path("tests/inputs/ci.json").write_text(json.dumps(CONFIG))
    write_atoms(Path("dataset/unit_test"))
dist.barrier()
sys.path.insert(0, str(Path(hydragnn.__file__).parents[1]))  # its `tests` before any other
optimizers = importlib.import_module("tests.test_optimizer")
weights = [size for kind, divided in WAYS for size in train(kind, divided)]
print(json.dumps({"program": "hydragnn_optimizer", "backend": backend, "losses": weights}), flush=True)
if backend == "gloo":
    os._exit(0)
