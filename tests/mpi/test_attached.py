"""What people attach to the optimizer of their own loop acts under every strategy, and who leaves a loop early, or
stands still in it, is told by name."""

import pytest

from tests.mpi.cases import launch_program
from tests.sampling import cells

LOOPS = {
    2: ["allreduce()", "localsgd(period=3)", "decentralized('ring')", "decentralized()", "async()"],
    3: ["sync()"],
    4: ["async(servers=3)"],
}


# servers leave the process inside `wrap`, so each of these takes a launch
SERVED = cells(
    [
        "elastic(moving_rate=0.0,push_every=2)", "backup(spare=0)", "softsync(updates=1)", "ssp(bound=1)",
        "bounded(staleness=1)", "async(optimizer='worker')", "sync(optimizer='worker')",
    ],
    lambda text: "elastic" in text,
)  # fmt: skip


@pytest.mark.parametrize(("ranks", "texts"), [*LOOPS.items(), *((2, [text]) for text in SERVED)])
def test_schedulers_hooks_and_scalers_act_as_without_us(ranks, texts):
    """One worker, or workers of the same batches: torch's own loop, to the bit; the rates, the steps and what hooks see
    under every strategy."""
    run = launch_program(ranks, "attached_loop", *texts).check()
    workers = ranks - {"async(servers=3)": 3}.get(texts[-1], 1)
    for text in texts:
        assert run.stdout.count(f"ok {text}\n") == (workers if text == texts[-1] else ranks), str(run)


@pytest.mark.parametrize(
    ("strategy", "what", "said"),
    [
        ("decentralized()", "exit", "rank 1 has left the loop after 3 step(s)"),
        ("decentralized('ring',asynchronous=True)", "break", "rank 1 has left the loop after 3 step(s)"),
        ("decentralized()", "raise", "KeyError: 'planted'"),
        ("localsgd(period=2)", "exit", "rank 1"),
        (
            "localsgd(period=4)",
            "break",
            "the workers meet after different numbers of steps (4 on rank 0, 3 on rank 1",
        ),
        ("allreduce()", "exit", "rank 1"),
    ],
)
def test_a_rank_that_leaves_its_loop_early_is_told_by_name(strategy, what, said):
    run = launch_program(3, "leaves_its_loop", strategy, what, "60")
    assert run.code not in (0, 75) and said in run.stderr, str(run)


@pytest.mark.parametrize("strategy", ["decentralized()", "sync()"])
def test_a_rank_that_stands_still_in_its_loop_ends_the_job(tmp_path, strategy):
    """With the stacks of all ranks, as in a run of ours."""
    env = {"MPITRAIN_RUN_DIR": str(tmp_path / "run")}
    run = launch_program(3, "leaves_its_loop", strategy, "sleep", "6", env=env)
    stuck = 2 if strategy == "sync()" else 1
    assert run.code == 1 and f"rank {stuck} (" in run.stderr, str(run)
    assert "no progress for 6 s (watchdog_s= of mpitrain.wrap)" in run.stderr, str(run)
    stacks = (tmp_path / "run" / "stacks" / f"rank-{stuck}.txt").read_text()
    assert "no progress for 6 s" in stacks and "leaves_its_loop.py" in stacks
    assert len(list((tmp_path / "run" / "stacks").glob("rank-*.txt"))) == 3


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_a_signal_to_a_rank_that_still_imports_is_heard_when_the_run_begins(tmp_path, name):
    """It ends after its first step, with a checkpoint, in place of dying of the signal."""
    job = tmp_path / "job.py"
    job.write_text("from tests import toy\njob = toy.make_job(epochs=50)\n")
    run = launch_program(
        1, "signalled_early", name, "train", str(job), "--run-dir", str(tmp_path / name), "--quiet"
    )
    assert run.code == 75, str(run)
    assert list((tmp_path / name / "checkpoints").iterdir())
