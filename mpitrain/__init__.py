"""mpitrain: train PyTorch models over MPI, with every update rule behind one door.

Names are loaded on first use, so `import mpitrain` (and `mpitrain --help`) imports neither torch nor MPI nor h5py. And
`import torch` imports this file (`torch_backend.py`), and `torch_versions.py`; of the package it loads nothing else.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from mpitrain.torch_backend import register_backend_lazily

__version__ = "0.2.0"

_home = {
    "Pause": "mpitrain.inject",
    "Slow": "mpitrain.inject",
    "Stall": "mpitrain.inject",
    "attach_codec": "mpitrain.training.synchronous.codec_hooks",
    "Collected": "mpitrain.model.metrics",
    "Job": "mpitrain.job",
    "Options": "mpitrain.options",
    "PerEpoch": "mpitrain.strategies.ticks",
    "RowwiseAdagrad": "mpitrain.embedding.rowwise_adagrad",
    "ServedEmbedding": "mpitrain.embedding.served",
    "ShardWriter": "mpitrain.data",
    "Samples": "mpitrain.data",
    "Shards": "mpitrain.data",
    "Stream": "mpitrain.data",
    "Synthetic": "mpitrain.data",
    "Transformed": "mpitrain.data",
    "Weighted": "mpitrain.data",
    "PackOptions": "mpitrain.data.write.plan",
    "pack": "mpitrain.data.write.pack",
    "load": "mpitrain.training.trained_model",
    "predict": "mpitrain.training.trained.predict",
    "ensemble": "mpitrain.training.ensembles.ensemble",
    "export": "mpitrain.training.trained.export",
    "simulate": "mpitrain.simulation.call",
    "train": "mpitrain.training",
    "exclusive_mpi": "mpitrain.mpi.runtime",
    "finish": "mpitrain.wrapping.loop",
    "num_workers": "mpitrain.wrapping.loop",
    "resumed": "mpitrain.wrapping.loop",
    "save": "mpitrain.wrapping.loop",
    "worker_index": "mpitrain.wrapping.loop",
    "wrap": "mpitrain.wrapping.loop",
}

register_backend_lazily()  # `import mpitrain` is all that init_process_group("mpi4py") needs
# `rank_status.VARIABLE`: the first thing of a rank that its launch hears of
if "MPITRAIN_LAUNCH_DIR" in os.environ:
    importlib.import_module("mpitrain.system.launched.rank_status").begin()


def __getattr__(name: str) -> Any:
    values = importlib.import_module("mpitrain.strategies.registry").MODULES
    if name == "__all__":
        return sorted({*_home, *values})
    if name not in _home and name not in values:
        raise AttributeError(
            f"module 'mpitrain' has no attribute {name!r}; it has {', '.join(__getattr__('__all__'))}"
        )
    value = getattr(importlib.import_module(_home.get(name, "mpitrain.strategies")), name)
    globals()[name] = value
    return value
