"""What a rank does, written once for both worlds: generators that yield effects. No MPI, no torch, no clock
in here.
"""

from mpitrain.roles.saving import Save, SavingServer
from mpitrain.roles.server import Server
from mpitrain.roles.tolerant import TolerantServer
from mpitrain.roles.worker import Worker

__all__ = ["Save", "SavingServer", "Server", "TolerantServer", "Worker"]
