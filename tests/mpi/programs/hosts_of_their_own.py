"""Ranks that give themselves host names."""

import ctypes
import os
import socket
import sys

if ctypes.CDLL(None, use_errno=True).unshare(0x04000000):  # a host name of its own
    sys.exit(77)
socket.sethostname("host" + "aba"[int(os.environ["PMI_RANK"])])
from mpitrain.mpi.runtime import start  # noqa: E402  MPI asks for the name when it starts
from mpitrain.system.launched.launch_variables import node_name  # noqa: E402

rt = start()
print(*rt.nodes, rt.num_nodes, rt.local_rank, node_name())
