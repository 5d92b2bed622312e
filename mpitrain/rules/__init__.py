"""Decisions as data: importing this package registers every strategy, damping, codec and warm-up with the text
parser.
"""

from mpitrain.rules.allreduce import AllReduce
from mpitrain.rules.asynchronous import Async
from mpitrain.rules.averaging import Average, DiLoCo, LocalSGD, Outer, SlowMo
from mpitrain.rules.base import Push, ServerStrategy, Strategy, Verdict
from mpitrain.rules.batching import Batching, BySpeed, PerRound, PerWorker
from mpitrain.rules.bounded import Bounded
from mpitrain.rules.compression import (
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
from mpitrain.rules.damping import Damping, DelayCompensated, Drop, GapAware, Inverse, Keep, Power
from mpitrain.rules.dealing import Dealer, Lease
from mpitrain.rules.decentralized import Decentralized
from mpitrain.rules.elastic import Elastic
from mpitrain.rules.grid import Grid, arrange
from mpitrain.rules.judged import Judged
from mpitrain.rules.ledger import Ledger, disagreement
from mpitrain.rules.lockstep import Backup, Sync
from mpitrain.rules.pipeline import Pipeline
from mpitrain.rules.placement import Roles, allot, assign
from mpitrain.rules.schedules import ConstantRate, Cosine, Decay, Gradual, Schedule
from mpitrain.rules.sharded import Sharded
from mpitrain.rules.softsync import SoftSync
from mpitrain.rules.splitting import Split
from mpitrain.rules.ssp import StaleSync
from mpitrain.rules.tensor import TensorParallel
from mpitrain.rules.warmup import Warmup

__all__ = [
    "AllReduce", "Async", "Average", "BFloat16", "Backup", "Batching", "Bounded", "BySpeed", "Codec",
    "ConstantRate", "Cosine", "Damping", "Dealer", "Decay", "Decentralized", "DelayCompensated",
    "DiLoCo", "Drop", "EightBit", "Elastic", "Float16", "GapAware", "Gradual", "Grid", "Inverse", "Judged", "Keep",
    "Lease", "Ledger", "LocalSGD", "OneBit", "Outer", "PerRound", "PerWorker", "Pipeline", "Power",
    "PowerSGD", "Push", "QSGD", "Roles", "Schedule", "ServerStrategy", "Sharded", "SlowMo", "SoftSync",
    "Split", "StaleSync", "Strategy", "Sync", "TensorParallel", "Threshold", "TopK", "Uncompressed",
    "Verdict", "Warmup", "allot", "arrange", "assign", "disagreement",
]  # fmt: skip
