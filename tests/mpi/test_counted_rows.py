"""Several servers over real ranks, with a job in which every sample adds one to rows of its own, one on each shard:
whatever is told to end, is started again, also with other servers, or dies between two shards, all rows end the same.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from mpitrain.checkpoint.parts import FOLDER, listed
from tests.mpi.cases import call, launch_calls
from tests.sampling import sampled

RULES = {
    "async": "async(servers={})",
    "inflight": "async(servers={},inflight=2)",
    "ssp": "ssp(bound=1,servers={})",
    "pushes": "async(servers={},push_every=2)",
}
SAMPLE = ("pushes",)
FINISHED = 4.0


def check_rows(path, servers):
    result = json.loads((path / "result.json").read_text())
    assert (result["status"], result["failure"], result["samples"]) == ("ok", "", 4 * 48)
    shards = [rank for rank in result["ranks"] if rank["role"] == "server"]
    assert [shard["samples_accepted"] for shard in shards] == [4 * 48] * servers
    rows = load_file(result["model"])["weight"]
    assert torch.equal(rows, torch.full_like(rows, FINISHED)), rows
    return result


@pytest.fixture(scope="module")
def stopped(request, tmp_path_factory):
    """A strategy told to end, and trained whole with checkpoints; then gone on from with one, two and three
    servers."""
    name, path = request.param, tmp_path_factory.mktemp("stopped")
    text = RULES[name]
    stop, whole = call("run", name, text.format(2), victim=2), f"{name}-whole"
    launch_calls(4, "counted_rows", path, [stop, call("run", whole, text.format(2), every="40")]).check()
    for folder in listed(path / whole)[:-1]:
        shutil.rmtree(folder)
    again = []
    for servers in (1, 2, 3):
        for source in (name, whole):
            to = path / f"{source}-{servers}" / FOLDER
            to.parent.mkdir()
            shutil.copytree(path / source / FOLDER, to)
            again.append(call("run", f"{source}-{servers}", text.format(servers), "auto"))
    launch_calls(4, "counted_rows", path, again).check()
    return name, path


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("stopped", sampled(RULES, SAMPLE), indirect=True)
def test_a_run_that_goes_on_takes_every_sample_once_on_every_shard(stopped, servers):
    name, stopped = stopped
    ended = json.loads((stopped / name / "result.json").read_text())
    assert ended["status"] == "requeue"
    assert check_rows(stopped / f"{name}-{servers}", servers)["resumed_from"] > 0
    assert 0 < check_rows(stopped / f"{name}-whole-{servers}", servers)["resumed_from"] < 4 * 48


def test_a_worker_that_dies_between_two_shards_leaves_nothing_half_judged(tmp_path):
    """What it had pushed to the first shard alone is computed again, and only the second one takes it."""
    dying = [call("run_dying", "dying", "ssp(bound=2,servers=2)", 3)]
    launch_calls(5, "counted_rows", tmp_path, dying, mpirun_args=("--with-ft", "ulfm"))
    result = check_rows(tmp_path / "dying", 2)
    assert result["lost"] == {"3": "died"}
    assert result["repeated"] == 1
