"""Supervises a Python program as `mpitrain launch` does. Arguments: seconds of grace at the end, the program."""

import sys

from mpitrain.launch import supervision
from mpitrain.launch.supervision import Requests, Supervisor

supervision.END_GRACE_S = float(sys.argv[1])
with Requests() as requests:
    outcome = Supervisor("openmpi", requests).run([sys.executable, sys.argv[2]], {})
sys.exit(outcome.code)
