"""Runs that ranks and threads both take."""

from mpitrain.checkpoint import newest
from tests import toy

BEGUN, WHOLE = 1, 2  # epochs


def dyadic_job():
    """Every sum is exact, in whatever order, so both worlds have to hold the same bits."""
    return toy.make_job(
        model=toy.linear_float32, loss=toy.linear_loss, optimizer=toy.dyadic_sgd, batch_size=4, epochs=WHOLE,
        checkpoint_every="16",
    )  # fmt: skip


def until_complete(train, run_dir, agreed=lambda found: found):
    """Train again where no checkpoint of a run is whole: a worker that is asked for its part of the next one before it
    has written that of this one writes the next one's, and a run of a few pushes may end with none."""
    while True:
        train()
        if agreed(newest(run_dir) is not None):
            return
