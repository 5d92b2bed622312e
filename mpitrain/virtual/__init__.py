"""The virtual world: the same roles on a heap of events instead of a cluster, with real gradients and seeded
times.
"""

from mpitrain.virtual.compute import ComputeLaw, Constant, Exponential, LogNormal, ShiftedExponential
from mpitrain.virtual.compute_laws import Bernoulli, Gamma, MeasuredCompute, Pareto, Persistent, Recorded
from mpitrain.virtual.costs import Costs
from mpitrain.virtual.network import Cluster, Ideal, Link, MeasuredNetwork, NetworkLaw
from mpitrain.virtual.world import VirtualWorld

__all__ = [
    "Bernoulli", "Cluster", "ComputeLaw", "Constant", "Costs", "Exponential", "Gamma", "Ideal", "Link",
    "LogNormal", "MeasuredCompute", "MeasuredNetwork", "NetworkLaw", "Pareto", "Persistent", "Recorded",
    "ShiftedExponential", "VirtualWorld",
]  # fmt: skip
