"""`doctor --comm` between four nodes of one rank each whose links are as planted: the first measurement of a pair, and
the later ones. Prints how often each pair was measured."""

import os
from functools import partial

from mpitrain.system.launched.launch_variables import launched_rank

rank = launched_rank()
os.environ["SLURMD_NODENAME"] = f"n{rank}"

from mpitrain.doctor import pairs  # noqa: E402
from mpitrain.mpi import ping_pong  # noqa: E402
from mpitrain.mpi.runtime import start  # noqa: E402

pairs.node_name = partial("n{}".format, rank)  # under Hydra Slurm's name is not heard

GOOD, BAD = (1e-5, 1e9), (1e-5, 1e8)
# Pair -> what its first measurement gives, and what the later ones give; all others are good.
PLANTED = (
    {},
    {(0, 1): (BAD, GOOD)},  # a busy moment
    {(0, 1): (BAD, BAD)},  # a bad link
    {(a, 3): (BAD, BAD) for a in range(3)},  # a bad node
    {(a, 3): (BAD, GOOD) for a in range(3)},  # a node that was busy
)

runtime = start()
for planted in PLANTED:
    counts: dict[tuple[int, int], int] = {}

    def measured(_, peer, planted=planted, counts=counts):
        pair = (min(rank, peer), max(rank, peer))
        counts[pair] = counts.get(pair, 0) + 1
        first, later = planted.get(pair, (GOOD, GOOD))
        return first if counts[pair] == 1 else later

    ping_pong.ping_pong = measured
    code = pairs.run_comm(runtime, None)
    print("measured", code, " ".join(f"{a}{b}:{n}" for (a, b), n in sorted(counts.items())))
