"""Which runs are recorded: small jobs under every family of strategies, in every world.

A few strategies of each world are combined with every feature, the others with a few features. Strategies whose workers
go on alone have in virtual time as many workers as the others; over MPI and in threads, where the order in which they
arrive is left to chance, they have one worker, or are repeated in virtual time in an order that was recorded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import mpitrain as mt
from mpitrain.strategies.base import Strategy
from mpitrain.values import parse
from tests import toy
from tests.mpi import splits

VIRTUAL, THREADS, MPI = "virtual", "threads", "mpi"
WHOLE, RESUMED, RECORDED = "whole", "resumed", "resumed from the recorded checkpoint"
FRESH, REPLAYED = "fresh order", "recorded order"


@dataclasses.dataclass(frozen=True)
class Run:
    """One run. `of`: the key of the run from whose checkpoint it goes on, or whose order of arrival it repeats."""

    world: str
    workers: int
    text: str
    feature: str
    course: str = WHOLE
    of: str = ""

    @property
    def key(self) -> str:
        """What names it in the recording."""
        return f"{self.world} {self.workers} | {self.text} | {self.feature} | {self.course}"

    @property
    def ranks(self) -> int:
        """Of a launch over MPI, all of which are on one node."""
        strategy = parse(self.text, "strategy")
        assert isinstance(strategy, Strategy)
        return self.workers + strategy.num_servers() + int(strategy.aggregates)


def dropping() -> nn.Module:
    """Its forward pass draws."""
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.25), nn.Linear(8, 1))


def gently(parameters: Any) -> torch.optim.Optimizer:
    """Converges under stale gradients, too."""
    return torch.optim.SGD(parameters, lr=0.005, momentum=0.5)


def plain(parameters: Any) -> torch.optim.Optimizer:
    """What rows of tables can be trained by."""
    return torch.optim.SGD(parameters, lr=0.01)


def nan_at_one_sample(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Not finite for the batch with the largest target."""
    loss = toy.square_loss(model, batch)
    return loss * float("nan") if batch["y"].max() > LARGE else loss


def by_function(epochs: float, workers: int) -> float:
    """A job's own factor on the rate."""
    return float(0.5 ** (epochs / 2) / workers)


NUM_SAMPLES = (
    32  # no multiple of the batches of any number of workers; the last ones have more than one sample
)
LARGE = float(toy.MemoryReader(toy.Memory(NUM_SAMPLES)).y.sort(0).values[-2])
WHOLE_MODELS = {"stages": None, "tensor_plan": {}}
NAMED: dict[str, dict[str, Any]] = {
    "model": toy.NORMED | {"dropping": dropping},
    "optimizer": {
        "plain": plain,
        "adam": toy.adam,
        "two groups": toy.two_groups,
        "hooked": toy.hooked,
    },
    "loss": {"weighted": toy.weighted_loss, "nan": nan_at_one_sample},
    "scheduler": toy.SCHEDULERS,
    "schedule": {
        "gradual": mt.Gradual(epochs=1),
        "decay": mt.Decay(every=1, by=0.5),
        "function": by_function,
    },
    "metrics": toy.METRICS,
    "transform": {"noisy": toy.noisy},
    "data": {"windows": toy.Memory(NUM_SAMPLES, window_samples=8), "weighted": toy.DATA["weighted"]},
}
_BEST = {"keep_best": "validation_loss", "validate_every": "7 samples"}
_DROPPING = {"model": "dropping", "stages": None, "tensor_plan": {"0": "column", "3": "row"}}
_EVERYTHING = {
    "clip_norm": 0.3, "clip_value": 0.05, "ema": 0.7, "validate_ema": True, "accumulate": 2, "scheduler": "one cycle",
    **_BEST,
}  # fmt: skip
_AT_ONCE = {key: value for key, value in _EVERYTHING.items() if key != "accumulate"}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "all at once": _AT_ONCE,
    "everything": _EVERYTHING,
    "everything in bfloat16": {**_EVERYTHING, **_DROPPING, "precision": "bfloat16", "scheduler": "warm up"},
    "adam": {"optimizer": "adam", "schedule": "decay"},
    "norm": {"clip_norm": 0.3},
    "value": {"clip_value": 0.02},
    "ema": {"ema": 0.7},
    "best": _BEST,
    "best by the average": {
        "ema": 0.5, "validate_ema": True, "keep_best": "ema_validation_loss", "validate_every": 2, "epochs": 4,
    },
    "patience": {"patience": 1, "keep_best": ">validation_loss", "validate_every": "12 samples", "epochs": 6},
    "accumulate": {"accumulate": 3},
    "accumulate, weighted": {"accumulate": 3, "loss": "weighted", "clip_norm": 0.3},
    "weighted": {"loss": "weighted"},
    "scheduler": {"scheduler": "warm up"},
    "schedule by a function": {"schedule": "function"},
    "two groups": {"optimizer": "two groups"},
    "hooked": {"optimizer": "hooked"},
    "bfloat16": {"precision": "bfloat16"},
    "dropping": _DROPPING,
    "recomputed": {**_DROPPING, "activation_checkpointing": True, "accumulate": 2},
    "skip": {"loss": "nan", "on_nonfinite": "skip"},
    "stop": {"loss": "nan"},
    "normed": {"model": "normed", **WHOLE_MODELS},
    "statistics of all": {"model": "normed", "sync_batchnorm": True, **WHOLE_MODELS},
    "looked up": {"model": "looked up", "optimizer": "plain", **WHOLE_MODELS},
    "looked up, everything": {"model": "looked up", "optimizer": "plain", **_EVERYTHING, **WHOLE_MODELS},
    "looked up, by value": {
        "model": "looked up", "optimizer": "plain", "clip_value": 0.05, "ema": 0.7, **_BEST, **WHOLE_MODELS,
    },
    "looked up as dense": {"model": "looked up", "sparse_as_dense": True, **WHOLE_MODELS},
    "served": {"model": "served", "optimizer": "plain", "clip_value": 0.05, **WHOLE_MODELS},
    "collected": {"metrics": "collected"},
    "noisy": {"transform": "noisy"},
    "windows": {"data": "windows"},
    "drawn": {"data": "weighted", "drop_last": True},
    "several optimizers": {"step": "by turns", **WHOLE_MODELS},
}  # fmt: skip
FEW = ("plain", "everything", "everything in bfloat16", "adam", "looked up, everything")
FEW_AT_ONCE = ("plain", "all at once", "adam", "looked up")  # of those that add up batches in their own way
FEW_OF_TABLES = ("looked up", "looked up, by value", "served", "everything")
GONE_ON = (
    "plain", "everything", "all at once", "adam", "normed", "looked up", "looked up, by value", "dropping", "best",
    "windows",
)  # fmt: skip
FROM_RECORDED = ("plain", "everything", "all at once", "looked up")

_DAMPINGS = ("inverse()", "power(1.0)", "drop(limit=1)", "delay_compensated()", "gap_aware()")
MAIN_TOGETHER = ("allreduce()", "sync()", "localsgd(period=2)", "decentralized()")
MAIN_SPLIT = ("pipeline(microbatches=2)", "tensor(parallel=2)", "sharded()")
MAIN_ALONE = ("async()", "elastic(push_every=2)")
TOGETHER = (
    "allreduce(codec=topk(density=0.2,dense_below=0))", "allreduce(codec=float16())",
    "allreduce(codec=threshold(density=0.1,dense_below=0))", "allreduce(codec=powersgd())", "sync(servers=2)",
    "sync(servers=2,push_wire='bfloat16',reply_wire='float16')",
    "sync(servers=2,push_wire=threshold(density=0.1,dense_below=0),reply_wire=eightbit(dense_below=0))",
    "sync(optimizer='worker')", "sync(servers=2,optimizer='worker',push_every=2)", "sync(push_every=2)",
    "sync(batching=per_round())", "backup(spare=0,servers=2)", "hybrid()", "hybrid(tables='servers',servers=2)",
    "localsgd(period=2,average_optimizer=True,outer=diloco())", "localsgd(period=7,unit='samples',outer=slowmo())",
    "localsgd(period=2,start=2,wire='int8',average_buffers=False)", "localsgd(period=3,wire='float16')",
    "decentralized(topology='ring')", "decentralized(topology='exponential',resync=2)",
    "decentralized(codec=threshold(density=0.1,dense_below=0))",
    "decentralized(topology='ring',codec=topk(density=0.2,dense_below=0))",
    "decentralized(warmup=warmup(epochs=0.5))",
)  # fmt: skip
ALONE = (
    "async(servers=2)", *(f"async(damping={one})" for one in _DAMPINGS), "async(servers=2,inflight=2)",
    "async(push_every=2)", "async(optimizer='worker',push_every=3,pull_every=2)",
    "async(servers=2,push_wire='bfloat16',reply_wire='float16')",
    "async(servers=2,push_wire=threshold(density=0.1,dense_below=0),reply_wire=eightbit(dense_below=0))",
    "async(push_wire=qsgd(dense_below=0))", "async(push_wire=onebit(dense_below=0))",
    "async(warmup=warmup(epochs=0.5))", "elastic(servers=2,push_every=3)",
)  # fmt: skip
OF_SEVERAL = (  # which one worker cannot run, or not in earnest
    "softsync(updates=2)", "softsync(updates=2,damping=power(1.0),servers=2)", "softsync(updates=2,blocking=True)",
    "ssp(bound=1)", "ssp(bound=3,servers=2,push_wire='bfloat16')", "bounded(staleness=1)",
    "bounded(staleness=2,servers=2)", "backup(spare=1)", "backup(spare=1,servers=2)",
    "softsync(updates=2,inflight=2,push_every=2)",
)  # fmt: skip
ONLY_VIRTUAL = (
    "backup(stragglers='abort')", "sync(batching=by_speed())", "async(batching=by_speed())",
    "decentralized(asynchronous=True)", "decentralized(asynchronous=True,resync=2,codec=eightbit(dense_below=0))",
    "pipeline(microbatches=2,schedule='gpipe')",
)  # fmt: skip
ON_FOUR = ("sharded(replicas=2)", "tensor(parallel=2)", "pipeline(microbatches=2)")
AGGREGATED = "sync(aggregate='node')"
REPLAYS = (
    "async(servers=2,damping=inverse())", "softsync(updates=2)", "ssp(bound=1,servers=2)",
    "bounded(staleness=1,servers=2)", "elastic(push_every=2,servers=2)", "backup(spare=1)",
    "async(servers=2,inflight=2)", "async(optimizer='worker',push_every=3,pull_every=2)",
    "async(servers=2,push_wire=threshold(density=0.1,dense_below=0),reply_wire=eightbit(dense_below=0))",
)  # fmt: skip
REPLAYED_FEATURES = ("plain", "everything")


def make_job(feature: str) -> mt.Job:
    """The small job with this feature, which writes a checkpoint every 12 samples."""
    fields: dict[str, Any] = {
        "model": lambda: splits.Deep().float(), "loss": toy.square_loss, "batch_size": 6, "optimizer": gently,
        "data": toy.Memory(NUM_SAMPLES), "validate": toy.Memory(24), "checkpoint_every": "12", "keep_checkpoints": 99,
    } | FEATURES[feature]  # fmt: skip
    for key, named in NAMED.items():
        if isinstance(fields.get(key), str):
            found = named[fields[key]]
            fields[key] = found() if key == "data" and callable(found) else found
    if "step" in fields:
        fields |= toy.BY_TURNS
    return splits.changed(splits.deep_job(), **fields)


def all_runs() -> list[Run]:
    """In an order in which each comes after the one it goes on from."""
    return [*_virtual(), *_real(THREADS, ()), *_real(MPI, MAIN_SPLIT), *_on_four(), *_replays()]


def few(text: str) -> tuple[str, ...]:
    """A few features under this strategy, most of which it does not refuse."""
    if text.startswith("hybrid"):
        return FEW_OF_TABLES
    adds_up = ("push_every" in text and not text.startswith("elastic")) or text.startswith("pipeline")
    return FEW_AT_ONCE if adds_up else FEW


def _virtual() -> Iterator[Run]:
    for text in (*MAIN_TOGETHER, *MAIN_SPLIT, *MAIN_ALONE):
        yield from (Run(VIRTUAL, 2 if text in MAIN_SPLIT else 3, text, feature) for feature in FEATURES)
    for text in (*TOGETHER, *ALONE, *OF_SEVERAL, *ONLY_VIRTUAL):
        yield from (Run(VIRTUAL, 3, text, feature) for feature in few(text) if "pipeline" not in text)
    yield from (Run(VIRTUAL, 4, text, feature) for text in (*ON_FOUR, AGGREGATED) for feature in few(text))
    yield from (Run(VIRTUAL, 2, ONLY_VIRTUAL[-1], feature) for feature in FEW_AT_ONCE)


def _real(world: str, split: tuple[str, ...]) -> Iterator[Run]:
    """With every feature, and gone on from a checkpoint with some."""
    for text in (*MAIN_TOGETHER, *split, *MAIN_ALONE):
        workers = 1 if text in MAIN_ALONE else 2
        for feature in FEATURES:
            yield from _course(Run(world, workers, text, feature), feature in GONE_ON)
    for text in (*TOGETHER, *ALONE):
        for feature in few(text):
            yield from _course(Run(world, 1 if text in ALONE else 2, text, feature), feature in GONE_ON)
    for text in MAIN_TOGETHER:
        for feature in ("everything", "adam"):
            three = Run(world, 3, text, feature)
            yield three
            yield Run(world, 2, text, feature, "resumed with fewer workers", three.key)
    for feature in ("everything", "adam"):
        of = Run(world, 2, "sync(servers=2)", feature).key
        yield Run(world, 2, "sync()", feature, "resumed with fewer servers", of)


def _on_four() -> Iterator[Run]:
    for text in ON_FOUR:
        for feature in few(text):
            whole = Run(MPI, 4, text, feature)
            yield from _course(whole, feature in GONE_ON)
            if feature in GONE_ON:
                fewer = "sharded()" if text == "sharded(replicas=2)" else text
                yield Run(MPI, 2, fewer, feature, "resumed with fewer workers", whole.key)
    for feature in FEW:
        yield from _course(Run(MPI, 2, AGGREGATED, feature), feature in GONE_ON)


def _course(whole: Run, goes_on: bool) -> Iterator[Run]:
    yield whole
    if goes_on:
        yield dataclasses.replace(whole, course=RESUMED, of=whole.key)
        if whole.feature in FROM_RECORDED:
            yield dataclasses.replace(whole, course=RECORDED, of=whole.key)


def _replays() -> Iterator[Run]:
    """Runs whose order is left to chance, each repeated in its own order; and orders that were recorded."""
    for world in (THREADS, MPI):
        for text in REPLAYS:
            for feature in FEW_AT_ONCE[:2] if "push_every" in text else REPLAYED_FEATURES:
                fresh = Run(world, 3, text, feature, FRESH)
                yield fresh
                yield Run(VIRTUAL, 3, text, feature, f"{REPLAYED} of {world}", fresh.key)
