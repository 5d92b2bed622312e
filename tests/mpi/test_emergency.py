"""A run that is wedged: stacks of every rank, a checkpoint, and the next start goes on from there."""

import json
import shutil

import pytest

from mpitrain.checkpoint.parts import newest
from mpitrain.training.measure import same_model
from tests.mpi.cases import call, launch_calls

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


@pytest.fixture(scope="module")
def wedged(tmp_path_factory):
    """Each strategy wedged, in a launch of its own; all of them resumed and trained whole, in one."""
    path, ended = tmp_path_factory.mktemp("wedged"), {}
    for name, (text, orders) in WEDGED.items():
        # what is imported on first use may take longer than the watchdog's time
        runs = [call("train", f"first-{name}", text), call("train", name, text, inject=orders, watchdog_s=6)]
        ended[name] = launch_calls(RANKS, "wedged_runs", path, runs, timeout_s=DEADLINE_S)
        shutil.copytree(path / name, path / f"{name}-wedged")
    runs = [call("train", name, text, resume="auto") for name, (text, _) in WEDGED.items()]
    launch_calls(RANKS, "wedged_runs", path, runs).check()
    return path, ended


@pytest.mark.parametrize("name", WEDGED)
def test_a_wedged_run_leaves_stacks_and_a_checkpoint_from_which_the_next_start_goes_on(wedged, name):
    path, ended = wedged
    told, folder = ended[name], path / f"{name}-wedged"
    assert told.code not in (0, 75) and not (folder / "result.json").exists(), told
    assert "no progress for 6 s" in told.stderr, told
    stacks = [(folder / "stacks" / f"rank-{rank}.txt").read_text() for rank in range(RANKS)]
    assert all("most recent call first" in text for text in stacks)
    stuck = [rank for rank, text in enumerate(stacks) if " in self_destruct" in text or " in loss\n" in text]
    assert len(stuck) == len(WEDGED[name][1])
    found = newest(folder)
    assert found is not None, told
    assert (
        0 < found.checkpoint_at < 5 * 48
        and f"emergency checkpoint at {found.checkpoint_at} samples" in told.stderr
    )
    resumed = json.loads((path / name / "result.json").read_text())
    assert resumed["resumed_from"] == found.checkpoint_at
    assert (resumed["status"], resumed["samples"]) == ("ok", 5 * 48)
    if name != "async":
        whole = path / f"first-{name}" / "model.safetensors"
        assert same_model(whole, path / name / "model.safetensors")
