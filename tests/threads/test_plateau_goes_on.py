"""A scheduler that goes by what validations measure: one rank measures, all step at the same rates, and a run that is
resumed goes on with them."""

import threading
from collections import defaultdict
from functools import partial

import pytest
import torch
from torch.optim import lr_scheduler

import mpitrain as mt
from mpitrain.values import parse
from tests import toy
from tests.threads.test_schedules_go_on import FAMILIES


class Seen(torch.optim.SGD):
    """Remembers the rates of every optimizer of this process."""

    elementwise = True
    rates: dict = defaultdict(list)

    def step(self, closure=None):
        seen = Seen.rates[threading.get_ident()]
        if not seen or seen[-1] != self.param_groups[0]["lr"]:
            seen.append(self.param_groups[0]["lr"])
        return super().step(closure)


def lessening(optimizer):
    """Of a rate that no two validations share, for the loss is never below -1."""
    return lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=1e9, threshold_mode="abs"
    )


def train(path, strategy, threads, epochs):
    job = toy.make_job(
        optimizer=partial(Seen, lr=1e-4), scheduler=lessening, epochs=epochs, batch_size=4, data=toy.Memory(48),
        validate=toy.Memory(8), checkpoint_every="1",
    )  # fmt: skip
    Seen.rates.clear()
    mt.train(job, parse(strategy, "strategy"), threads=threads, run_dir=str(path), quiet=True, resume="auto")
    return [[round(1e-4 / rate) for rate in seen] for seen in Seen.rates.values()]


MORE = [
    "sync()", "decentralized(asynchronous=True, resync=3)", "elastic(push_every=1)", "softsync(updates=2)",
    "ssp(bound=1)", "sync(push_every=2)", "localsgd(start=2, period=3)",
]  # fmt: skip


@pytest.mark.parametrize(
    "strategy", [*FAMILIES, *(pytest.param(one, marks=pytest.mark.extended) for one in MORE)]
)
def test_all_step_at_the_same_rates_and_a_resumed_run_goes_on_with_them(strategy, tmp_path):
    """The rate is halved after every epoch but the first: with 3 workers, then with 2, then with 1."""
    first, second, third = (
        train(tmp_path, strategy, threads, epochs) for threads, epochs in ((3, 3), (2, 5), (1, 6))
    )
    assert first[0] == [1, 2] and all(one == first[0] for one in first)
    # the validation at the end of the last epoch is no part of the run before; a checkpoint, or a shard's part of one,
    # may be of before its end
    assert second and all(one in ([4, 8], [2, 4, 8]) for one in second), second
    assert third and all(one in ([16], [8, 16]) for one in third), third
