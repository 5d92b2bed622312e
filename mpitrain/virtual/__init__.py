"""The virtual world: the same roles on a heap of events instead of a cluster, with real gradients and seeded
times.
"""

from mpitrain.virtual.compute import ComputeLaw, Constant, Exponential, LogNormal, ShiftedExponential
from mpitrain.virtual.network import Ideal, Link, NetworkLaw
from mpitrain.virtual.world import VirtualWorld

__all__ = [
    "ComputeLaw", "Constant", "Exponential", "Ideal", "Link",
    "LogNormal", "NetworkLaw", "ShiftedExponential", "VirtualWorld",
]  # fmt: skip
