"""Runs that must come out the same on four ranks and in virtual time: to the bit, unless it is said otherwise."""

import mpitrain as mt
from tests import toy

PIECE_BYTES = 64  # in which both average

EXACT = toy.DYADIC["linear in float32"] | {
    "epochs": 1,
    "batch_size": 2,
}
# sums over ranks of the first ones are exact (few steps: momentum adds a bit to each); 8-bit messages are added in rank
# order in both worlds
RUNS = {
    "average": (mt.LocalSGD(period=2), EXACT),
    "samples": (mt.LocalSGD(period=20, unit="samples", average_optimizer=True), EXACT),
    "post": (mt.LocalSGD(period=3, start=2), EXACT),
    "bfloat16": (mt.LocalSGD(period=2, wire="bfloat16"), EXACT),
    "slowmo": (mt.LocalSGD(period=2, outer=mt.SlowMo(beta=0.5)), EXACT),
    "float64": (mt.LocalSGD(period=1), toy.DYADIC["quadratic in float64"] | {"epochs": 1, "batch_size": 4}),
    "diloco in 8 bits": (
        mt.LocalSGD(period=2, wire="int8", outer=mt.DiLoCo()),
        {"optimizer": toy.adam, "epochs": 2, "batch_size": 3, "schedule": mt.Decay(every=1, by=0.5)},
    ),
}

# all ranks take the same steps
TOGETHER = {
    "linear": (mt.AllReduce(), EXACT | {"batch_size": 4}),
    "quadratic": (mt.AllReduce(), toy.DYADIC["quadratic in float64"] | {"epochs": 2, "batch_size": 4}),
    "accumulated": (mt.AllReduce(), EXACT | {"batch_size": 2, "accumulate": 2}),
    "bfloat16 gradients": (mt.AllReduce(codec=mt.BFloat16()), EXACT | {"batch_size": 4}),
    "sharded": (mt.Sharded(), EXACT | {"batch_size": 4}),
    "two copies": (mt.Sharded(replicas=2), EXACT | {"batch_size": 4}),
    # sums that depend on their order, or on other kernels: nearly
    "rest": (mt.AllReduce(), toy.DYADIC["quadratic in float64"] | {"epochs": 2, "batch_size": 5}),
    "weighed": (mt.AllReduce(), toy.WEIGHTED),
    "clipped": (
        mt.AllReduce(), {"epochs": 2, "batch_size": 5, "clip_norm": 0.5, "ema": 0.75, "validate": toy.Memory(40)},
    ),
    "running": (
        mt.AllReduce(), {"model": toy.normed, "epochs": 2, "validate": toy.Memory(40)},
    ),
    "threshold": (mt.AllReduce(codec=mt.Threshold(density=0.25)), {"epochs": 2}),
    "powersgd": (mt.AllReduce(codec=mt.PowerSGD(rank=1)), {"epochs": 2, "batch_size": 3}),
    "pipeline": (mt.Pipeline(microbatches=3), {"model": toy.three_layers, "epochs": 1}),
    "tensor": (
        mt.TensorParallel(), {"model": toy.three_layers, "epochs": 1, "tensor_plan": {"0": "column", "2": "row"}},
    ),
}  # fmt: skip
NEARLY = ("rest", "clipped", "running", "threshold", "powersgd", "weighed", "pipeline", "tensor")

assert not RUNS.keys() & TOGETHER.keys()  # each has a run directory of its name
