"""mpitrain: train PyTorch models over MPI, with every update rule behind one door.

Names are loaded on first use, so `import mpitrain` (and `mpitrain --help`) imports neither torch nor MPI nor
h5py.
"""

from __future__ import annotations

import importlib
from typing import Any

from mpitrain.mpi.process_group.register import register_backend_lazily
from mpitrain.strategies.registry import MODULES
from mpitrain.system import rank_status

__version__ = "0.1.0"

_home = {
    **dict.fromkeys(MODULES, "mpitrain.strategies"),
    "Pause": "mpitrain.inject",
    "Slow": "mpitrain.inject",
    "Stall": "mpitrain.inject",
    "attach_codec": "mpitrain.training.synchronous.codec_hooks",
    "Collected": "mpitrain.model.metrics",
    "Job": "mpitrain.job",
    "Options": "mpitrain.options",
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
    "predict": "mpitrain.training.predict",
    "simulate": "mpitrain.simulation.servers",
    "train": "mpitrain.training",
    "finish": "mpitrain.wrapping.loop",
    "num_workers": "mpitrain.wrapping.loop",
    "resumed": "mpitrain.wrapping.loop",
    "save": "mpitrain.wrapping.loop",
    "worker_index": "mpitrain.wrapping.loop",
    "wrap": "mpitrain.wrapping.loop",
}

__all__ = sorted(_home)  # noqa: PLE0605


register_backend_lazily()  # `import mpitrain` is all that init_process_group("mpi4py") needs
rank_status.begin()  # the first thing of a rank that its launch hears of


def __getattr__(name: str) -> Any:
    if name not in _home:
        raise AttributeError(f"module 'mpitrain' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_home[name]), name)
    globals()[name] = value
    return value
