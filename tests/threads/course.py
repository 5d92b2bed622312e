"""Runs that ranks and threads both take."""

from tests import toy

BEGUN, WHOLE = 1, 2  # epochs


def dyadic_job():
    """Every sum is exact, in whatever order, so both worlds have to hold the same bits."""
    return toy.make_job(
        model=toy.linear_float32, loss=toy.linear_loss, optimizer=toy.dyadic_sgd, batch_size=4, epochs=WHOLE,
        checkpoint_every="16",
    )  # fmt: skip
