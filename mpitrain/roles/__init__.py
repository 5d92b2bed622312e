"""What a rank does, written once for both worlds: generators that yield effects. No MPI, no torch, no clock
in here.
"""

from mpitrain.roles.save_request import SaveRequest
from mpitrain.roles.server.fault_tolerant import FaultTolerantServer
from mpitrain.roles.server.norm_exchange import ClippingServer
from mpitrain.roles.server.server import Server
from mpitrain.roles.server.user_checkpoints import SavingServer
from mpitrain.roles.worker import Duties, Rhythm, Worker

__all__ = [
    "SaveRequest", "SavingServer", "Server", "ClippingServer", "Duties", "FaultTolerantServer", "Rhythm", "Worker",
]  # fmt: skip
