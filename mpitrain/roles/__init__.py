"""What a rank does, written once for both worlds: generators that yield effects. No MPI, no torch, no clock
in here.
"""

from mpitrain.roles.server.fault_tolerant import FaultTolerantServer
from mpitrain.roles.server.server import Server
from mpitrain.roles.server.user_checkpoints import Save, SavingServer
from mpitrain.roles.worker import Worker

__all__ = ["Save", "SavingServer", "Server", "FaultTolerantServer", "Worker"]
