"""What people attach to the optimizer of their own loop acts under every strategy, and who leaves a loop early, or
stands still in it, is told by name."""

import pytest

from tests.mpi.cases import PROGRAMS
from tests.ranks import find_mpi, run_ranks

LOOPS = {
    2: ["allreduce()", "localsgd(period=3)", "decentralized('ring')", "async()"],
    3: ["sync()"],
    4: ["async(servers=3)"],
}


@pytest.mark.parametrize(("ranks", "texts"), [*LOOPS.items(), (2, ["elastic(moving_rate=0.0,push_every=2)"])])
def test_schedulers_hooks_and_scalers_act_as_without_us(ranks, texts):
    """One worker, or workers of the same batches: torch's own loop, to the bit."""
    python, _ = find_mpi()
    run = run_ranks(ranks, [str(python), str(PROGRAMS / "attached_loop.py"), *texts]).check()
    workers = ranks - {"async()": 1, "sync()": 1, "async(servers=3)": 3}.get(texts[-1], 1)
    for text in texts:
        assert run.stdout.count(f"ok {text}\n") == (workers if text == texts[-1] else ranks), str(run)


ENDS = """
import sys, time
import torch
import mpitrain as mt
from mpitrain.values import parse
from tests import toy

model = toy.linear_float32()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = mt.wrap(model, optimizer, parse("{strategy}", "strategy"), watchdog_s={watchdog_s})
for step in range(8):
    if mt.worker_index() == 1 and step == 3:
        {what}
    toy.linear_loss(model, toy.Memory().reader(None, 0).batch(0, 4 * step, 4)).backward()
    optimizer.step()
mt.finish()
"""


@pytest.mark.parametrize(
    ("strategy", "what", "said"),
    [
        ("decentralized()", "sys.exit(3)", "rank 1 has left the loop after 3 step(s)"),
        ("decentralized('ring',asynchronous=True)", "break", "rank 1 has left the loop after 3 step(s)"),
        ("decentralized()", "raise KeyError('planted')", "KeyError: 'planted'"),
        ("localsgd(period=2)", "sys.exit(3)", "rank 1"),
        (
            "localsgd(period=4)",
            "break",
            "the workers meet after different numbers of steps (4 on rank 0, 3 on rank 1",
        ),
        ("allreduce()", "sys.exit(3)", "rank 1"),
    ],
)
def test_a_rank_that_leaves_its_loop_early_is_told_by_name(strategy, what, said):
    run = run_ranks(3, ENDS.format(strategy=strategy, what=what, watchdog_s=60))
    assert run.code not in (0, 75) and said in run.stderr, str(run)


@pytest.mark.parametrize("strategy", ["decentralized()", "sync()"])
def test_a_rank_that_stands_still_in_its_loop_ends_the_job(tmp_path, strategy):
    """With the stacks of all ranks, as in a run of ours."""
    program = ENDS.format(strategy=strategy, what="time.sleep(1000)", watchdog_s=6)
    run = run_ranks(3, program, env={"MPITRAIN_RUN_DIR": str(tmp_path / "run")})
    stuck = 2 if strategy == "sync()" else 1
    assert run.code == 1 and f"rank {stuck} (" in run.stderr, str(run)
    assert "no progress for 6 s (watchdog_s= of mpitrain.wrap)" in run.stderr, str(run)
    stacks = (tmp_path / "run" / "stacks" / f"rank-{stuck}.txt").read_text()
    assert "no progress for 6 s" in stacks and "script.py" in stacks
    assert len(list((tmp_path / "run" / "stacks").glob("rank-*.txt"))) == 3


EARLY = """
import os, signal, sys
from mpitrain.cli import main as cli

parse = cli.parse
cli.parse = lambda argv: (os.kill(os.getpid(), signal.{name}), parse(argv))[1]
sys.exit(cli.main(["train", "{job}", "--run-dir", "{path}/{name}", "--quiet"]))
"""


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_a_signal_to_a_rank_that_still_imports_is_heard_when_the_run_begins(tmp_path, name):
    """It ends after its first step, with a checkpoint, in place of dying of the signal."""
    job = tmp_path / "job.py"
    job.write_text("from tests import toy\njob = toy.make_job(epochs=50)\n")
    run = run_ranks(1, EARLY.format(name=name, job=job, path=tmp_path))
    assert run.code == 75, str(run)
    assert list((tmp_path / name / "checkpoints").iterdir())
