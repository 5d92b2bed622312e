"""What `published.py` assumes of the systems behind published curves, and when a simulated curve counts as a hit.

Invariants: this was written and committed before any curve was computed, and no figure here is fitted to a published
speed-up: rates and times come from the hardware of the time, sizes from the papers of the models. Where nothing was
published, a figure is our estimate and says so. Where several curves need the same figure, they share one. What a hit
is stands here, too; a curve that misses it is told as a miss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Assumption:
    """One figure that a simulation needs.

    Args:
        name: of the figure, with its unit where it has one; value: the figure.
        source: a sentence that says where it comes from.
        estimate: whether it is ours, for want of a published one.
        whole: whether only whole numbers make sense.
    """

    name: str
    value: float
    source: str
    estimate: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Published:
    """What was published, and what counts as the same.

    Args:
        figure: as told in a few words; source: who told it.
        low, high: a simulated value from `low` to `high` is a hit; criterion: what that value is.
    """

    figure: str
    source: str
    low: float
    high: float
    criterion: str


@dataclass(frozen=True)
class Curve:
    """One published curve and what its simulation starts from.

    Args:
        name: on the command line; published: the figure to meet; num_workers: of the published run.
        strategy: the update rule in the notation of `--strategy`; other: another one, to compare.
        assumptions: all figures, each of which is doubled and halved to see what the result hangs on.
    """

    name: str
    published: Published
    num_workers: int
    strategy: str
    assumptions: tuple[Assumption, ...]
    other: str = ""

    def values(self) -> dict[str, float]:
        """The figures by their names."""
        return {one.name: one.value for one in self.assumptions}


def within_a_quarter(
    figure: str, value: float, source: str, what: str = "speed-up over one worker alone"
) -> Published:
    """A figure that is hit within 25 per cent."""
    return Published(figure, source, 0.75 * value, 1.25 * value, f"{what}, within 25 % of {value:g}")


def changed(base: Iterable[Assumption], *others: Assumption) -> tuple[Assumption, ...]:
    """The assumptions of `base`, with others in place of those of the same name, and new ones behind."""
    found = {one.name: one for one in base} | {one.name: one for one in others}
    return tuple(found.values())


DEAN = "J. Dean, Large-Scale Deep Learning with TensorFlow, slides of talks in 2016"
OSDI = "Abadi et al., TensorFlow: a system for large-scale machine learning, OSDI 2016"
CHEN = "Chen et al., Revisiting Distributed Synchronous SGD, 2016"

# What all timing curves share: the machines that Google described in 2016.
GPU = Assumption(
    "worker_gflop_per_s", 1000.0,
    "TensorFlow's published benchmark of Inception v3 on one GPU of a K80 is 29 to 30 images/s, which is 1,000 GFLOP/s "
    "at 34 GFLOP an image; a K40's peak differs by 2 %.",
)  # fmt: skip
LINK = Assumption(
    "link_gbit_per_s", 8.0,
    f"One worker fetches 1 GB from 16 servers in 1.01 s ({OSDI}, null steps), which is 10 Gbit/s Ethernet less its "
    "overhead.",
)  # fmt: skip
LATENCY = Assumption(
    "latency_s", 0.45e-3,
    f"A null step of scalars takes 1.8 ms ({OSDI}); a quarter of it for each of the four messages of a fetch and an "
    "update is our estimate.",
    estimate=True,
)  # fmt: skip
SERVERS = Assumption(
    "servers_per_worker", 0.34,
    f"17 servers for Inception v3 ({OSDI}), here for 50 workers; the same ratio elsewhere is our estimate.",
    estimate=True,
)  # fmt: skip
SPREAD = Assumption(
    "spread_sigma", 0.05,
    f"Synchronous steps of Inception are about 10 % longer than asynchronous ones in the median ({OSDI}), as the "
    "longest of 50 log-normal times with this spread is.",
    estimate=True,
)  # fmt: skip
SLOW_CHANCE = Assumption(
    "slow_chance", 0.01,
    f"Of 100 gradients the last comes within 2 s in 30 % of steps and the last but one in 80 % ({CHEN}), which is 1.2 "
    "and 0.8 late ones in a hundred where they are late independently.",
)  # fmt: skip
SLOW_FACTOR = Assumption(
    "slow_factor", 2.0,
    "How late the late ones are was read off no figure: twice the usual time is our estimate.",
    estimate=True,
)  # fmt: skip
SPREADS = (SPREAD, SLOW_CHANCE, SLOW_FACTOR)
MACHINES = (GPU, LINK, LATENCY, SERVERS, *SPREADS)

BACKWARD = "times 2 for multiply and add, times 3 for forward and backward pass"


def model(
    parameters: float, gflop: float, batch: int, source: str, work: str, batches: str
) -> tuple[Assumption, ...]:
    """A model: millions of parameters, GFLOP that a sample takes forward and backward, and samples of a batch."""
    return (
        Assumption("parameters_million", parameters, source),
        Assumption("sample_gflop", gflop, work),
        Assumption("batch_samples", batch, batches, whole=True),
    )


NMT = Curve(
    "nmt",
    within_a_quarter("6x on 8", 6.0, f"neural machine translation on 8 GPUs; {DEAN}"),
    8,
    "async",
    changed(
        model(
            214.0, 17.1, 128,
            "Luong et al., Effective Approaches to Attention-based Neural Machine Translation, 2015: 4 layers of 1,000 "
            "cells on either side and 50,000 words, 64 million in cells and 150 million in three tables.",
            "25 words of 114 million multiply-adds in cells and output (the same paper's sizes; the mean length is our "
            f"estimate), {BACKWARD}.",
            "128 sentences (the same paper).",
        ),
        *MACHINES,
    ),
    other="sync",
)  # fmt: skip

INCEPTION_MODEL = model(
    23.8, 34.2, 32,
    "Szegedy et al., Rethinking the Inception Architecture, 2015: less than 25 million parameters; 23.8 are those of "
    "the published model without its auxiliary head.",
    f"5.7 billion multiply-adds of the published model, {BACKWARD}.",
    f"32 images a worker ({CHEN}).",
)  # fmt: skip
INCEPTION = Curve(
    "inception",
    within_a_quarter("32x on 50", 32.0, f"Inception on 50 GPUs; {DEAN}"),
    50,
    "async",
    changed(INCEPTION_MODEL, *MACHINES),
    other="sync",
)

DENSE_MODELS = {
    "AlexNet": model(
        61.0, 4.32, 128, "Krizhevsky et al., ImageNet Classification, NIPS 2012.",
        f"0.72 billion multiply-adds (the same paper's layers), {BACKWARD}.", "128 images (the same paper).",
    ),
    "GoogLeNet": model(
        6.8, 9.0, 32, "Szegedy et al., Going Deeper with Convolutions, 2014.",
        f"1.5 billion multiply-adds (the same paper), {BACKWARD}.", "32 images, as of Inception (our estimate).",
    ),
    "ResNet-152": model(
        60.2, 67.8, 32, "He et al., Deep Residual Learning, 2015; the parameters are those of the published model.",
        f"11.3 billion multiply-adds (the same paper), {BACKWARD}.",
        "32 images a GPU: 256 on 8 GPUs (the same paper).",
    ),
}  # fmt: skip
DENSE = Curve(
    "dense",
    Published(
        "25-40x on 50", f"what dense models typically gain from 50 replicas; {DEAN}", 25.0, 40.0,
        "median speed-up of AlexNet, GoogLeNet and ResNet-152, in the published range",
    ),
    50,
    "async",
    changed(
        (
            Assumption(
                "parameters_scale", 1.0,
                "Three models of the time stand for typical ones (our estimate), with the sizes of their papers.",
                estimate=True,
            ),
            Assumption("batch_scale", 1.0, "Batches as of their papers."),
        ),
        *MACHINES,
    ),
    other="sync",
)  # fmt: skip

WIDE_DEEP = "Cheng et al., Wide & Deep Learning for Recommender Systems, 2016"
RANKBRAIN = Curve(
    "rankbrain",
    within_a_quarter("300x on 500", 300.0, f"RankBrain, a sparse model, on 500 machines; {DEAN}"),
    500,
    "async",
    changed(
        MACHINES,
        Assumption(
            "dense_million", 1.88,
            f"RankBrain's layers are unpublished; those of {WIDE_DEEP}, stand for them (our estimate): 1,200 inputs, "
            "then 1,024, 512 and 256 units.",
            estimate=True,
        ),
        Assumption(
            "rows_per_sample", 37.0,
            f"1,200 inputs in tables of 32 columns each ({WIDE_DEEP}): 37 looked-up rows a sample.",
            estimate=True, whole=True,
        ),
        Assumption("row_numbers", 32.0, f"Columns of a row ({WIDE_DEEP})."),
        Assumption("id_numbers", 2.0, "The id of a row travels with it in 8 bytes, as TensorFlow's int64 ids do."),
        Assumption(
            "distinct_share", 0.5,
            "Words and features repeat within a batch: half the looked-up rows are distinct (our estimate).",
            estimate=True,
        ),
        Assumption(
            "batch_samples", 256.0, "Unpublished: some hundreds of samples (our estimate).", estimate=True, whole=True
        ),
        Assumption(
            "worker_gflop_per_s", 80.0,
            f"8 cores of Ivy Bridge, the size of a CPU task in {OSDI}: 333 GFLOP/s at 2.6 GHz, a share of 0.24 of "
            "which is reached as on the GPU (our estimate).",
            estimate=True,
        ),
        Assumption(
            "table_million", 100.0,
            "Numbers in all tables (our estimate); they only tell what it would cost if all rows travelled.",
            estimate=True,
        ),
    ),
)  # fmt: skip

CAMPOS = (
    "Campos et al., Distributed training strategies for a computer vision deep learning algorithm on a distributed GPU "
    "cluster, ICCS 2017"
)
CONVNET = Curve(
    "convnet",
    within_a_quarter(
        "nearly 5x on 8", 5.0, f"time to the lowest training loss of a convnet on 8 workers; {CAMPOS}",
        "time to the lowest training loss that both reach, one worker's over eight workers'",
    ),
    8,
    "async",
    changed(
        model(
            25.6, 24.6, 32, "ResNet-50 (He et al., Deep Residual Learning, 2015) stands for their network.",
            f"4.1 billion multiply-adds of the published model, {BACKWARD}.", "32 images (our estimate).",
        ),
        GPU,
        Assumption(
            "link_gbit_per_s", 10.0,
            "Their cluster has FDR InfiniBand of 56 Gbit/s; TensorFlow's TCP over it gets about 10 (our estimate).",
            estimate=True,
        ),
        LATENCY, SERVERS, *SPREADS,
        Assumption(
            "rate", 1e-3,
            "Adam at its default rate, the same for one and eight workers: none is tuned (our estimate). Their data "
            "are not free to use: a convnet of 29,000 parameters on 1,797 digits stands for theirs, with the ratio of "
            "transfer to computing of the published sizes.",
            estimate=True,
        ),
        Assumption("digits_batch", 16.0, "Samples of a worker's batch of digits (our estimate).", True, True),
    ),
)  # fmt: skip


def backup(num_workers: int, spare: int, source: str) -> Curve:
    """A published split of machines into workers and spares."""
    return Curve(
        f"backup {num_workers - spare}+{spare}",
        Published(
            f"{spare} spare of {num_workers}", source, spare / 2, spare * 2.0,
            "spares with which most gradients are accepted a second, half to twice as many as published",
        ),
        num_workers,
        "backup",
        SPREADS,
    )  # fmt: skip


BACKUP_18 = backup(
    20,
    2,
    f"18 workers and 2 spares is a split that is often retold without its source; the method is that of {CHEN}",
)
BACKUP_96 = backup(100, 4, f"of 100 machines, 96 workers and 4 spares train Inception soonest; {CHEN}")

AVERAGING = Curve(
    "averaging",
    Published(
        "10-20 do, 100 not",
        "Su and Chen, Experiments on Parallel Training of Deep Neural Network using Model Averaging, 2015, as often "
        "retold: averaging every 10 to 20 batches does acceptably, and losses grow with the period",
        0.0, 1.25,
        "final validation loss over that of period 1, at periods 10 and 20 (the larger), at most 1.25, and larger "
        "at period 100 than at either",
    ),
    8,
    "localsgd",
    (
        Assumption("workers", 8.0, "Half of the 16 GPUs that they go up to (our estimate).", True, True),
        Assumption("rate", 0.1, "Plain SGD as they have, at a usual rate (our estimate).", estimate=True),
        Assumption("digits_batch", 16.0, "Samples of a worker's batch of digits (our estimate).", True, True),
        Assumption("epochs", 30.0, "Passes over digits: 330 steps, three periods of 100 (our estimate).", True, True),
    ),
)  # fmt: skip
PERIODS = (1, 10, 20, 100)

BURST = Curve(
    "burst",
    Published(
        "burst, not spread",
        "that synchronous workers load a server's link in a burst, and asynchronous ones (Dean et al., Large Scale "
        "Distributed Deep Networks, NIPS 2012) spread over time, is a commonplace without a figure",
        2.0, float("inf"),
        "mean wait of a push at a server's link under sync() over that under async(), at least 2",
    ),
    50,
    "async",
    changed(INCEPTION_MODEL, *MACHINES),
)  # fmt: skip

STALENESS = Curve(
    "staleness",
    Published(
        "N-1",
        "Zhang et al., Staleness-aware Async-SGD for Distributed Deep Learning, IJCAI 2016: mean staleness about N; it "
        "is N - 1 where the server counts the updates of others",
        0.95, 1.05,
        "mean staleness over N - 1, the worst of all numbers of workers, within 5 %",
    ),
    64,
    "async",
    (*SPREADS, Assumption("steps", 100.0, "Pushes of a worker, for both ends to weigh little (ours).", True, True)),
)  # fmt: skip
STALENESS_WORKERS = (4, 8, 16, 32, 64)

CURVES = (
    NMT, INCEPTION, RANKBRAIN, DENSE, CONVNET, BACKUP_18, BACKUP_96, AVERAGING, BURST, STALENESS,
)  # fmt: skip
