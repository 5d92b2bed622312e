"""What a job takes as its data, and what a torch `DataLoader` contributes to it.

Invariants: what a loader asks for takes effect in the job, or the loader is refused with what to write instead.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)
from torch.utils.data.distributed import DistributedSampler

from mpitrain.data.datasets.as_source import as_source, is_source
from mpitrain.data.datasets.named_columns import refuse_arrays
from mpitrain.data.datasets.reader import LoaderOptions
from mpitrain.data.datasets.wrapped import Transformed, Weighted
from mpitrain.data.read.reader import Source
from mpitrain.data.read.transform import Transform
from mpitrain.errors import UsageError


class Adopted(NamedTuple):
    """Data as a source, and what a loader says of the job's batches: None and False without one."""

    source: Source
    batch_size: int | None = None
    drop_last: bool = False


def adopt(key: str, value: object, transform: Transform | None = None) -> Adopted:
    """Make a source of what a user has.

    Args:
        key: the job's field; transform: the job's, for every batch.
    Raises:
        UsageError: no data, a loader that asks for what a job does otherwise, or a dataset that cannot be dealt.
    """
    if isinstance(value, Transformed) and value.by_job:  # of a job that this one is made of
        value = value.source
    refuse_arrays(value.dataset if isinstance(value, DataLoader) else value, f"Job: {key}")
    if isinstance(value, DataLoader):
        adopted = _from_loader(f"Job: {key}'s DataLoader", value, trains=key != "validate")
    elif (source := as_source(value)) is not None:
        adopted = Adopted(source)
    else:
        what = f"{type(value).__module__.split('.')[0]}'s {type(value).__name__}"
        raise UsageError(
            f"Job: {key} must be mpitrain.Shards(...), mpitrain.Synthetic(...), or a Dataset or DataLoader of torch, "
            f"or a dict of arrays, got {what}. Any other iterable of samples is written into shards once, "
            'mpitrain.pack(samples, "data/mine"), and read with mpitrain.Shards("data/mine/train-*.h5")'
        )
    if key == "validate" and isinstance(adopted.source, Weighted):
        raise UsageError("Job: validate counts every sample once; leave mpitrain.Weighted out")
    return (
        adopted
        if transform is None
        else adopted._replace(source=Transformed(adopted.source, transform, True))
    )


def _from_loader(where: str, loader: DataLoader[Any], trains: bool) -> Adopted:
    if loader.batch_size is None:
        raise UsageError(
            f"{where} has batch_size=None or a batch_sampler of its own, and a job deals the samples of each batch "
            "itself; give batch_size, and weights of samples by mpitrain.Weighted(dataset, weights)"
        )
    options = {field.name: getattr(loader, field.name, None) for field in dataclasses.fields(LoaderOptions)}
    options["prefetch_factor"] = loader.prefetch_factor or 2
    collated = loader.collate_fn
    options["collate_fn"] = None if collated in (default_collate, default_convert) else collated
    if is_source(loader.dataset) and options["collate_fn"]:
        raise UsageError(
            f"{where} has a collate_fn, and {type(loader.dataset).__name__} makes batches itself; write "
            "mpitrain.Transformed(source, function), a function of (batch, random)"
        )
    source = as_source(loader.dataset, **options)
    if source is None:
        raise UsageError(f"{where} has a dataset without samples by index, {type(loader.dataset).__name__}")
    if type(loader.batch_sampler) not in (BatchSampler, type(None)):
        raise UsageError(
            f"{where} has a batch_sampler, {type(loader.batch_sampler).__name__}, and a job deals batches itself; "
            "give batch_size and shuffle=True"
        )
    weights = _weights(where, loader, trains)
    if weights is not None:
        source = Weighted(source, *weights)
    return Adopted(source, loader.batch_size, bool(loader.drop_last))


def _weights(where: str, loader: DataLoader[Any], trains: bool) -> tuple[Any, int] | None:
    """Weights and number of draws, if its sampler draws by weight.

    Raises:
        UsageError: its sampler asks for an order that a job does not have.
    """
    sampler = loader.sampler
    if not hasattr(loader.dataset, "__getitem__") or type(sampler).__name__ == "_InfiniteConstantSampler":
        return None  # a stream, which has its own order
    if isinstance(sampler, WeightedRandomSampler) and trains and sampler.replacement:
        return sampler.weights, sampler.num_samples
    if type(sampler) is RandomSampler and trains:
        if sampler.replacement or sampler.num_samples != len(sampler.data_source):
            raise UsageError(
                f"{where} draws {sampler.num_samples} samples an epoch{' with replacement' * sampler.replacement}; "
                "write mpitrain.Weighted(dataset, [1] * len(dataset), num_samples), or shuffle=True alone"
            )
        return None
    if type(sampler) is SequentialSampler and not trains:
        return None
    raise UsageError(f"{where} {_way_out(sampler, trains)}")


def _way_out(sampler: object, trains: bool) -> str:
    name = type(sampler).__name__
    if not trains:
        return (
            f"has {name}, and validation takes every sample once, in order; leave shuffle and sampler out (for a part "
            "of the samples: torch.utils.data.Subset(dataset, indices))"
        )
    if type(sampler) is SequentialSampler:
        return "does not shuffle, and a job shuffles its training samples by its seed; write shuffle=True"
    if isinstance(sampler, DistributedSampler):
        return (
            "has a DistributedSampler, and a job deals the samples over its ranks itself; write shuffle=True in place "
            "of the sampler"
        )
    if isinstance(sampler, SubsetRandomSampler):
        return "has a SubsetRandomSampler; write DataLoader(torch.utils.data.Subset(dataset, indices), shuffle=True)"
    if isinstance(sampler, WeightedRandomSampler):
        return (
            "draws by weight without replacement, which cannot be dealt; write WeightedRandomSampler(weights, "
            "num_samples, replacement=True)"
        )
    return (
        f"has a sampler of its own, {name}, and a job deals the samples itself; write shuffle=True, or "
        "mpitrain.Weighted(dataset, weights) where it draws by weight"
    )
