"""Runs that ranks and threads both take."""

from mpitrain.checkpoint import newest
from mpitrain.values import parse
from tests import toy

IN_16_BITS = " in 16 bits"
BEGUN, WHOLE = 1, 2  # epochs


def dyadic_job(name):
    """A strategy's job. Every sum is exact, in whatever order, so both worlds have to hold the same bits."""
    made = {"model": toy.linear_float32, "loss": toy.linear_loss}
    if name.endswith(IN_16_BITS):
        made = toy.LINEAR_BFLOAT16 | {"ema": 0.5, "validate": toy.Memory(12), "validate_ema": True}
    return toy.make_job(
        **made, optimizer=toy.dyadic_sgd, batch_size=4, epochs=WHOLE, checkpoint_every="16",
    )  # fmt: skip


def strategy_of(name):
    return parse(name.removesuffix(IN_16_BITS), "strategy")


def until_complete(train, run_dir, agreed=lambda found: found):
    """Train again where no checkpoint of a run is whole: a worker that is asked for its part of the next one before it
    has written that of this one writes the next one's, and a run of a few pushes may end with none."""
    while True:
        train()
        if agreed(newest(run_dir) is not None):
            return
