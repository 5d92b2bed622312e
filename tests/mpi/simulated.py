"""Runs of periodic averaging that must come out the same to the bit on four ranks and in virtual time."""

import mpitrain as mt
from tests import toy

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
