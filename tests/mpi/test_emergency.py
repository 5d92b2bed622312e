"""A run that is wedged: stacks of every rank, a checkpoint, and the next start goes on from there."""

import json

import pytest

from mpitrain.checkpoint.parts import newest
from mpitrain.training.measure import same_model
from tests.mpi.cases import call, launch_calls
from tests.sampling import sampled

DEADLINE_S = 180.0
RANKS = 4
# name: strategy, who is wedged
WEDGED = {
    "allreduce": ("allreduce()", ["wedge(worker=1,at_step=5)"]),
    "async": ("async()", [f"wedge(worker={worker},at_step={4 + worker})" for worker in range(3)]),
    "sync": ("sync(servers=2)", ["wedge(worker=1,at_step=7)"]),
    # two pipelines of two stages, of which the first one's write; split models take no orders
    "pipeline": ("pipeline(stages=2,microbatches=2)", ["loss"]),
}
SAMPLE = ("sync",)


@pytest.mark.parametrize("name", sampled(WEDGED, SAMPLE))
def test_a_wedged_run_leaves_stacks_and_a_checkpoint_from_which_the_next_start_goes_on(tmp_path, name):
    (text, orders), folder = WEDGED[name], tmp_path / "wedged"
    # what is imported on first use may take longer than the watchdog's time
    runs = [call("train", "whole", text), call("train", "wedged", text, inject=orders, watchdog_s=6)]
    told = launch_calls(RANKS, "wedged_runs", tmp_path, runs, timeout_s=DEADLINE_S)
    assert told.code not in (0, 75) and not (folder / "result.json").exists(), told
    assert "no progress for 6 s" in told.stderr, told
    stacks = [(folder / "stacks" / f"rank-{rank}.txt").read_text() for rank in range(RANKS)]
    assert all("most recent call first" in text for text in stacks)
    stuck = [rank for rank, text in enumerate(stacks) if " in self_destruct" in text or " in loss\n" in text]
    assert len(stuck) == len(orders)
    found = newest(folder)
    assert found is not None, told
    assert (
        0 < found.checkpoint_at < 5 * 48
        and f"emergency checkpoint at {found.checkpoint_at} samples" in told.stderr
    )
    launch_calls(RANKS, "wedged_runs", tmp_path, [call("train", "wedged", text, resume="auto")]).check()
    resumed = json.loads((folder / "result.json").read_text())
    assert resumed["resumed_from"] == found.checkpoint_at
    assert (resumed["status"], resumed["samples"]) == ("ok", 5 * 48)
    if name != "async":
        assert same_model(tmp_path / "whole" / "model.safetensors", folder / "model.safetensors")
