"""What each rank of `mpitrain launch SCRIPT` starts: the script, where the variables are set that torchrun sets.

    python -m mpitrain.launch.torchrun_names [OPTIONS OF PYTHON] SCRIPT [ARGUMENTS]

Invariants: the standard library alone is imported. The script runs in this very process, as if python had been started
with these words; MASTER_ADDR and MASTER_PORT are left as they are, for a second group would meet there.
"""

import os
import sys

from mpitrain.system.launched.launch_variables import torchrun_names
from mpitrain.torch_backend import SCRIPT_OF


def main(words: list[str]) -> None:
    """Become the script."""
    names = torchrun_names()
    os.environ.update(names | ({SCRIPT_OF: names["WORLD_SIZE"]} if "WORLD_SIZE" in names else {}))
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main(sys.argv[1:])
