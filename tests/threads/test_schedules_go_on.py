"""Learning rates of a run that goes on with other workers: a schedule goes on where it was."""

import json
from functools import partial

import pytest
import torch
from torch.optim import lr_scheduler

import mpitrain as mt
from mpitrain.values import parse
from tests import toy

NUM_SAMPLES, BATCH = 48, 4


class Seen(torch.optim.SGD):
    """Remembers the rate of every step in this process."""

    elementwise = True
    rates: list = []

    def step(self, closure=None):
        Seen.rates.append(self.param_groups[0]["lr"])
        return super().step(closure)


def train(path, strategy, threads, resume=None, **changes):
    fields = {
        "epochs": 4,
        "batch_size": BATCH,
        "checkpoint_every": "1",
        "data": toy.Memory(NUM_SAMPLES),
    } | changes
    job = toy.make_job(optimizer=partial(Seen, lr=0.1), **fields)
    Seen.rates = []
    result = mt.train(
        job, parse(strategy, "strategy"), threads=threads, run_dir=str(path), quiet=True, resume=resume
    )
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return result, [rate for at, rate in enumerate(Seen.rates) if not at or rate != Seen.rates[at - 1]], rows


def shrinking(optimizer):
    """Of a rate that no two ticks share."""
    return lr_scheduler.ExponentialLR(optimizer, 0.9)


FAMILIES = [
    "allreduce()",
    "async(servers=2)",
    'sync(optimizer="worker")',
    "localsgd(period=1)",
    "decentralized()",
]
MORE = ["sync()", "elastic(push_every=1)", "softsync(updates=2)", "sync(push_every=2)", "ssp(bound=1)"]


@pytest.mark.parametrize(
    "strategy", [*FAMILIES, *(pytest.param(one, marks=pytest.mark.extended) for one in MORE)]
)
def test_a_torch_scheduler_goes_on_where_it_was_with_other_workers(strategy, tmp_path):
    """Two epochs with three workers are 8 ticks, two more with two workers 12, then one of one worker is another 12."""
    path, rates = tmp_path / "run", []
    for threads, epochs in ((3, 2), (2, 4), (1, 5)):
        _, seen, rows = train(path, strategy, threads, "auto", scheduler=shrinking, epochs=epochs)
        told = [(row["tick"], row["ticks"]) for row in rows if row["event"] == "schedule"]
        rates.append(
            [round(torch.log(torch.tensor(rate / 0.1)).div(torch.tensor(0.9).log()).item()) for rate in seen]
        )
    assert [told[0][0], told[-1][0]] == ["12 -> 8 samples", "8 -> 4 samples"]
    # whom nobody waits for may leave a tick out or come late, and what a checkpoint had not yet is done again
    for at, counts in zip((0, told[0][1], told[1][1]), rates, strict=True):
        assert at - 1 <= min(counts) <= at + 1 and max(counts) <= at + 16
    assert max(rates[0]) <= 8 and told[0][1] in (5, 6, 7, 8) and max(rates[2]) >= 28


@pytest.mark.parametrize("strategy", ["allreduce()", "async()"])
def test_one_that_counts_epochs_knows_no_workers_and_one_that_was_meant_to_is_named(strategy, tmp_path):
    path, found = tmp_path / "run", []
    for threads, epochs in ((3, 2), (2, 4)):
        _, seen, rows = train(
            path, strategy, threads, "auto", scheduler=mt.PerEpoch(shrinking), epochs=epochs
        )
        assert not [row for row in rows if row["event"] in ("schedule", "warning")]
        found += [rate for rate in seen if rate not in found]
    assert found == pytest.approx([0.1 * 0.9**count for count in range(4)])

    meant = partial(lr_scheduler.CosineAnnealingLR, T_max=2)
    _, _, rows = train(tmp_path / "other", strategy, 2, scheduler=meant, epochs=2)
    [text] = [row["text"] for row in rows if row["event"] == "warning"]
    assert text.startswith("scheduler: the rate falls from 0.1 to 0 within 2 of the run's 12 steps")


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=16)


@pytest.mark.parametrize("strategy", ["allreduce()", "async()"])
def test_a_scheduler_that_ends_before_the_run_keeps_its_last_rate_and_is_named(strategy, tmp_path):
    _, seen, rows = train(tmp_path / "run", strategy, 3, "auto", scheduler=one_cycle, epochs=3)
    assert not [row for row in rows if row["event"] == "schedule ends before the run"]
    _, seen, rows = train(tmp_path / "run", strategy, 1, "auto", scheduler=one_cycle, epochs=4)
    told = [(row["tick"], row["ticks"]) for row in rows if row["event"] == "schedule ends before the run"]
    assert told[0][0] == 15 and 24 <= told[0][1] <= 36  # a checkpoint may be one before the last step
    assert seen[-1] == pytest.approx(0.1 / 25 / 1e4) and min(seen) == seen[-1]


@pytest.mark.parametrize("strategy", ["localsgd(period=1)"])
def test_other_batches_at_an_epochs_end_make_other_ticks(strategy, tmp_path):
    path = tmp_path / "run"
    train(path, strategy, 2, "auto", scheduler=shrinking, epochs=2)  # 12 ticks
    _, seen, rows = train(path, strategy, 2, "auto", scheduler=shrinking, epochs=3, batch_size=6)
    assert [(row["tick"], row["ticks"]) for row in rows if row["event"] == "schedule"] == [
        ("8 -> 12 samples", 12)
    ]
    assert seen == pytest.approx([0.1 * 0.9**count for count in (12, 13, 14, 15)])


@pytest.mark.parametrize("strategy", ["allreduce()", 'async(optimizer="worker")'])
def test_a_factor_that_goes_by_the_workers_changes_with_them_and_is_named(strategy, tmp_path):
    path, schedule = tmp_path / "run", mt.Gradual(epochs=1)
    train(path, strategy, 3, "auto", schedule=schedule, epochs=2)
    _, seen, rows = train(path, strategy, 2, "auto", schedule=schedule, epochs=3)
    (told,) = [row for row in rows if row["event"] == "schedule"]
    before, after = map(float, told["factor"].split(" -> "))
    # 1 + 2 p and 1 + p after p of the epoch: without lockstep the newest checkpoint may be of before the end
    assert before - 1 == pytest.approx(2 * (after - 1), abs=0.01) and after > 1
    assert after == 2 or strategy != "allreduce()"
    assert told["workers"] == "3 -> 2" and seen[-1] == pytest.approx(0.2)
    _, _, rows = train(path, strategy, 1, "auto", schedule=mt.Cosine(9), epochs=4)
    assert len([row for row in rows if row["event"] == "schedule"]) == 1  # which goes by samples alone
