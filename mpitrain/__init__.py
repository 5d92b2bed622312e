"""mpitrain: train PyTorch models over MPI, with every update rule behind one door.

Names are loaded on first use, so `import mpitrain` (and `mpitrain --help`) imports neither torch nor MPI nor
h5py.
"""

from __future__ import annotations

import importlib
from typing import Any

from mpitrain import rank_status
from mpitrain.mpi.register import register_backend_lazily

__version__ = "0.1.0"

_home = {
    "AllReduce": "mpitrain.rules",
    "Async": "mpitrain.rules",
    "Average": "mpitrain.rules",
    "Backup": "mpitrain.rules",
    "Bounded": "mpitrain.rules",
    "BySpeed": "mpitrain.rules",
    "ConstantRate": "mpitrain.rules",
    "Cosine": "mpitrain.rules",
    "Decay": "mpitrain.rules",
    "Decentralized": "mpitrain.rules",
    "DelayCompensated": "mpitrain.rules",
    "DiLoCo": "mpitrain.rules",
    "Drop": "mpitrain.rules",
    "Elastic": "mpitrain.rules",
    "GapAware": "mpitrain.rules",
    "Gradual": "mpitrain.rules",
    "Inverse": "mpitrain.rules",
    "Keep": "mpitrain.rules",
    "LocalSGD": "mpitrain.rules",
    "Pause": "mpitrain.inject",
    "PerRound": "mpitrain.rules",
    "PerWorker": "mpitrain.rules",
    "Pipeline": "mpitrain.rules",
    "Power": "mpitrain.rules",
    "Sharded": "mpitrain.rules",
    "Slow": "mpitrain.inject",
    "SlowMo": "mpitrain.rules",
    "SoftSync": "mpitrain.rules",
    "StaleSync": "mpitrain.rules",
    "Stall": "mpitrain.inject",
    "Sync": "mpitrain.rules",
    "TensorParallel": "mpitrain.rules",
    "Warmup": "mpitrain.rules",
    "BFloat16": "mpitrain.rules",
    "EightBit": "mpitrain.rules",
    "Float16": "mpitrain.rules",
    "OneBit": "mpitrain.rules",
    "PowerSGD": "mpitrain.rules",
    "QSGD": "mpitrain.rules",
    "Threshold": "mpitrain.rules",
    "TopK": "mpitrain.rules",
    "Uncompressed": "mpitrain.rules",
    "attach_codec": "mpitrain.training.hooks",
    "Job": "mpitrain.job",
    "ShardWriter": "mpitrain.data",
    "Shards": "mpitrain.data",
    "Synthetic": "mpitrain.data",
    "PackOptions": "mpitrain.data.plan",
    "pack": "mpitrain.data.pack",
    "simulate": "mpitrain.simulation",
    "train": "mpitrain.training",
    "finish": "mpitrain.wrapping",
    "num_workers": "mpitrain.wrapping",
    "resumed": "mpitrain.wrapping",
    "save": "mpitrain.wrapping",
    "worker_index": "mpitrain.wrapping",
    "wrap": "mpitrain.wrapping",
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
