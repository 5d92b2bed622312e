"""On the PYTHONPATH of what tests start, so that each Python of it reads this as it begins.

Where RANK_POOL names a server of warm ranks (`tests/rank_pool/`), a rank, or a command of mpitrain that imports torch,
becomes a client of it, however it was started: by `mpitrain launch`, a template of Slurm, a line of the documentation.
`make coverage` has every process measure itself.
"""

import importlib
import os
import sys

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
# The others do not import torch, or start runs that are to outlive them.
_COMMANDS = ("train", "simulate", "data", "doctor", "env", "plan", "predict", "export", "ensemble")
_OF_SLURM = ("render", "submit")
_BECOMES_ANOTHER = "mpitrain.launch.torchrun_names"  # a script, which reads this file in its turn


def may_be_warm(argv: list[str]) -> bool:
    """Whether `python *argv` is a rank or such a command, and the server can do what this python was told to."""
    words = argv[1:] if argv[:1] == ["-P"] else argv
    if os.environ.get("OMP_NUM_THREADS") != "1" or not words:  # torch reads it only once
        return False
    if words[0] == "-m" and len(words) > 1:
        program, words = words[1], words[2:]
        if program == _BECOMES_ANOTHER:
            return False
    elif words[0] == "-c" or not words[0].startswith("-"):
        program, words = os.path.basename(words[0]), words[1:]
    else:
        return False
    if program == "mpitrain":
        if words[:1] == ["slurm"]:
            return words[1:] != [] and words[1] in _OF_SLURM
        return words[:1] != [] and words[0] in _COMMANDS
    return any(name in os.environ for name in _RANKS)


def become_warm() -> None:
    """Does not return where the server has forked a rank in place of this process."""
    prefix, address, folder = os.environ.pop("RANK_POOL").split(os.pathsep)
    argv = sys.orig_argv[1:]
    if sys.prefix != prefix or not may_be_warm(argv):
        os.environ["RANK_POOL"] = os.pathsep.join([prefix, address, folder])  # for what it starts
        return
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(__file__)), "rank_pool"))
    try:
        importlib.import_module("client").ask(address, folder, argv)
    except OSError:  # the server is gone
        pass
    del sys.path[0], sys.modules["client"]


if "RANK_POOL" in os.environ:
    become_warm()
if "COVERAGE_PROCESS_START" in os.environ:
    import coverage

    coverage.process_startup()
