"""A run whose second worker is stopped, under a watchdog."""

import sys

import mpitrain as mt
from mpitrain.training.watchdog import watchdog
from tests import toy

watchdog.GRACE_S = 2.0


def train(name, **options):
    mt.train(toy.make_job(epochs=5, batch_size=4), run_dir=f"{sys.argv[1]}/{name}", quiet=True, **options)


train("first")  # what is imported on first use may take longer than the watchdog's time
train("run", inject=["stop(worker=1,at_step=5)"], watchdog_s=6.0)
