"""Decisions as data: importing this package registers every strategy, damping, codec and warm-up with the text
parser.
"""

from mpitrain.strategies.allreduce import AllReduce
from mpitrain.strategies.base import Push, ServerStrategy, Strategy, Verdict
from mpitrain.strategies.compression import (
    QSGD,
    BFloat16,
    Codec,
    EightBit,
    Float16,
    OneBit,
    PowerSGD,
    Threshold,
    TopK,
    Uncompressed,
)
from mpitrain.strategies.damping import Damping, DelayCompensated, Drop, GapAware, Inverse, Keep, Power
from mpitrain.strategies.decentralized import Decentralized
from mpitrain.strategies.local_sgd import Average, DiLoCo, LocalSGD, Outer, SlowMo
from mpitrain.strategies.model_parallel.base import Split
from mpitrain.strategies.model_parallel.mesh_layout import Grid, arrange
from mpitrain.strategies.model_parallel.pipeline import Pipeline
from mpitrain.strategies.model_parallel.sharded import Sharded
from mpitrain.strategies.model_parallel.tensor import TensorParallel
from mpitrain.strategies.parameter_server.asynchronous import Async
from mpitrain.strategies.parameter_server.batch_size import Batching, BySpeed, PerRound, PerWorker
from mpitrain.strategies.parameter_server.bounded import Bounded
from mpitrain.strategies.parameter_server.elastic import Elastic
from mpitrain.strategies.parameter_server.judged import Judged
from mpitrain.strategies.parameter_server.softsync import SoftSync
from mpitrain.strategies.parameter_server.ssp import StaleSync
from mpitrain.strategies.parameter_server.staleness import Ledger, disagreement
from mpitrain.strategies.parameter_server.sync import Backup, Sync
from mpitrain.strategies.placement import Roles, allot, assign
from mpitrain.strategies.sampling.dealer import Dealer, Lease
from mpitrain.strategies.schedules import ConstantRate, Cosine, Decay, Gradual, Schedule
from mpitrain.strategies.warmup import Warmup

__all__ = [
    "AllReduce", "Async", "Average", "BFloat16", "Backup", "Batching", "Bounded", "BySpeed", "Codec",
    "ConstantRate", "Cosine", "Damping", "Dealer", "Decay", "Decentralized", "DelayCompensated",
    "DiLoCo", "Drop", "EightBit", "Elastic", "Float16", "GapAware", "Gradual", "Grid", "Inverse", "Judged", "Keep",
    "Lease", "Ledger", "LocalSGD", "OneBit", "Outer", "PerRound", "PerWorker", "Pipeline", "Power",
    "PowerSGD", "Push", "QSGD", "Roles", "Schedule", "ServerStrategy", "Sharded", "SlowMo", "SoftSync",
    "Split", "StaleSync", "Strategy", "Sync", "TensorParallel", "Threshold", "TopK", "Uncompressed",
    "Verdict", "Warmup", "allot", "arrange", "assign", "disagreement",
]  # fmt: skip
