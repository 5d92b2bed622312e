"""Training data: HDF5 shards read per rank, torch's datasets, synthetic samples, and one global order.

Invariants: it knows torch, numpy and h5py and never MPI. Rank 0 scans, all other ranks receive the
catalogue as JSON; which positions of the order a rank reads is decided elsewhere. A source is `Shards`,
`Synthetic`, `Samples` (a dataset by index), `Stream` (one without), `Transformed` or `Weighted`:

    catalogue = source.scan()                           # counts, shapes, dtypes; or DataError
    with source.reader(catalogue, seed) as reader:
        batch = reader.batch(epoch, start, count)       # these positions of its order, a dict
        reader.prefetch(epoch, start + count, count)    # a hint: read meanwhile

Its names are loaded on first use: reading needs torch, packing and checking do not.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitrain.data.datasets.samples import Samples
    from mpitrain.data.datasets.streams import Stream
    from mpitrain.data.datasets.wrapped import Transformed, Weighted
    from mpitrain.data.format.catalogue import ArraySpec, Catalogue, ShardInfo
    from mpitrain.data.read.order import Order
    from mpitrain.data.read.reader import Reader
    from mpitrain.data.read.shards import Shards
    from mpitrain.data.read.synthetic import Synthetic
    from mpitrain.data.write.writer import ShardWriter

_home = {
    "ArraySpec": "mpitrain.data.format.catalogue",
    "Catalogue": "mpitrain.data.format.catalogue",
    "Order": "mpitrain.data.read.order",
    "Reader": "mpitrain.data.read.reader",
    "Samples": "mpitrain.data.datasets.samples",
    "ShardInfo": "mpitrain.data.format.catalogue",
    "ShardWriter": "mpitrain.data.write.writer",
    "Shards": "mpitrain.data.read.shards",
    "Stream": "mpitrain.data.datasets.streams",
    "Synthetic": "mpitrain.data.read.synthetic",
    "Transformed": "mpitrain.data.datasets.wrapped",
    "Weighted": "mpitrain.data.datasets.wrapped",
}
__all__ = [
    "ArraySpec", "Catalogue", "Order", "Reader", "Samples", "ShardInfo", "ShardWriter", "Shards", "Stream", "Synthetic",
    "Transformed", "Weighted",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _home:
        raise AttributeError(f"module 'mpitrain.data' has no attribute {name!r}")
    value = getattr(importlib.import_module(_home[name]), name)
    globals()[name] = value
    return value
