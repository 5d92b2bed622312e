"""mpitrain: train PyTorch models over MPI, with every update rule behind one door.

Names are loaded on first use, so `import mpitrain` (and `mpitrain --help`) imports neither torch nor MPI nor
h5py.
"""

from __future__ import annotations

import importlib
from typing import Any

from mpitrain.mpi.process_group.register import register_backend_lazily
from mpitrain.system import rank_status

__version__ = "0.1.0"

_home = {
    "AllReduce": "mpitrain.strategies",
    "Async": "mpitrain.strategies",
    "Average": "mpitrain.strategies",
    "Backup": "mpitrain.strategies",
    "Bounded": "mpitrain.strategies",
    "BySpeed": "mpitrain.strategies",
    "ConstantRate": "mpitrain.strategies",
    "Cosine": "mpitrain.strategies",
    "Decay": "mpitrain.strategies",
    "Decentralized": "mpitrain.strategies",
    "DelayCompensated": "mpitrain.strategies",
    "DiLoCo": "mpitrain.strategies",
    "Drop": "mpitrain.strategies",
    "Elastic": "mpitrain.strategies",
    "GapAware": "mpitrain.strategies",
    "Gradual": "mpitrain.strategies",
    "Inverse": "mpitrain.strategies",
    "Keep": "mpitrain.strategies",
    "LocalSGD": "mpitrain.strategies",
    "Pause": "mpitrain.inject",
    "PerRound": "mpitrain.strategies",
    "PerWorker": "mpitrain.strategies",
    "Pipeline": "mpitrain.strategies",
    "Power": "mpitrain.strategies",
    "Sharded": "mpitrain.strategies",
    "Slow": "mpitrain.inject",
    "SlowMo": "mpitrain.strategies",
    "SoftSync": "mpitrain.strategies",
    "StaleSync": "mpitrain.strategies",
    "Stall": "mpitrain.inject",
    "Sync": "mpitrain.strategies",
    "TensorParallel": "mpitrain.strategies",
    "Warmup": "mpitrain.strategies",
    "BFloat16": "mpitrain.strategies",
    "EightBit": "mpitrain.strategies",
    "Float16": "mpitrain.strategies",
    "OneBit": "mpitrain.strategies",
    "PowerSGD": "mpitrain.strategies",
    "QSGD": "mpitrain.strategies",
    "Threshold": "mpitrain.strategies",
    "TopK": "mpitrain.strategies",
    "Uncompressed": "mpitrain.strategies",
    "attach_codec": "mpitrain.training.synchronous.codec_hooks",
    "Job": "mpitrain.job",
    "ShardWriter": "mpitrain.data",
    "Shards": "mpitrain.data",
    "Synthetic": "mpitrain.data",
    "PackOptions": "mpitrain.data.write.plan",
    "pack": "mpitrain.data.write.pack",
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
