"""A job file that kills rank 1 while the others wait for it in MPI, unless the file that DIED names is there."""

import os
import signal
from pathlib import Path

from mpitrain.system.launched.launch_variables import launched_rank
from tests import toy

died = Path(os.environ["DIED"])
if launched_rank() == 1 and not died.exists():
    died.touch()
    os.kill(os.getpid(), signal.SIGKILL)
job = toy.make_job(epochs=1)
