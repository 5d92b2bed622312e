"""A source in memory whose sample i is the number i: what jobs that count samples train on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mpitrain.data.format.catalogue import ArraySpec, Catalogue, ShardInfo


@dataclass(frozen=True)
class Indices:
    """Sample i is `index` i, and, `with_inputs`, four numbers `x` that follow from it."""

    num_samples: int
    with_inputs: bool = False

    def scan(self):
        arrays = {"index": ArraySpec((), "int64")}
        arrays |= {"x": ArraySpec((4,), "float32")} if self.with_inputs else {}
        return Catalogue((ShardInfo("indices", self.num_samples, self.num_samples),), arrays, 1)

    def reader(self, catalogue, seed):
        return _Reading(self.with_inputs)


class _Reading:
    """In the order of their numbers, in every epoch."""

    def __init__(self, with_inputs):
        self._with_inputs = with_inputs

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def batch(self, epoch, start, count):
        index = torch.arange(start, start + count)
        inputs = {"x": index[:, None] / torch.tensor([8.0, 16.0, 32.0, 64.0])}
        return {"index": index} | (inputs if self._with_inputs else {})

    def prefetch(self, epoch, start, count):
        pass
