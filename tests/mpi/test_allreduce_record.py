"""Which algorithm carries a run's allreduces is kept, and taken again by a resume: its bits depend on no timing."""

import json

import pytest

from mpitrain.errors import UsageError
from mpitrain.mpi.allreduce_plan import VARIABLE, Plan, Transport
from mpitrain.training.measure import same_model
from tests.mpi.cases import launch_program
from tests.ranks import needs_open_mpi


def test_a_plan_goes_over_to_ranks_that_lie_alike_only(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    first = Plan([0, 0, 1])
    kept = first.state()
    first.learn([[0, 1], [2]], Transport(1e-4, 1e7))  # after the state was asked for, and in it nevertheless
    kept = json.loads(json.dumps(kept))
    again, moved = Plan([0, 0, 1]), Plan([0, 1, 1])
    assert again.adopt(kept) and again.known([[0, 1], [2]]) == Transport(1e-4, 1e7)
    assert again.known([[0], [2]]) is None
    assert not moved.adopt(kept) and moved.known([[0, 1], [2]]) is None
    monkeypatch.setenv(VARIABLE, "direct")
    assert again.setting() == "direct"
    pinned = again.state()
    monkeypatch.delenv(VARIABLE)
    assert again.setting() == "auto" and again.adopt(pinned) and again.setting() == "direct"
    assert not again.adopt(None) and again.setting() == "auto"  # a run of its own
    again.renumber([0, 1])
    assert again.known([[0, 1], [2]]) is None and again.state()["nodes"] == [0, 1]
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(UsageError, match="auto, library, direct, hierarchical"):
        again.setting()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("record")
    launch_program(3, "recorded_allreduce", str(found), cwd=found).check()
    return found


def record(path, name):
    told = json.loads((path / name / "run.json").read_text())["allreduce"]
    rows = [json.loads(line) for line in (path / name / "metrics.jsonl").read_text().splitlines()]
    events = [row for row in rows if row["event"] == "allreduce"]
    return told, events, [int((path / name / f"measured-{rank}").read_text()) for rank in range(3)]


def test_a_resume_takes_the_algorithm_of_the_run_whatever_it_would_measure(path):
    first, told, measured = record(path, "slow")
    assert "hierarchical" in first["chosen"].values() and measured == [1, 1, 1] and told == []
    again, told, measured = record(path, "slow-again")
    assert again == first and measured == [0, 0, 0] and told == []
    assert same_model(path / "slow" / "model.safetensors", path / "slow-again" / "model.safetensors")


def test_a_pin_wins_and_says_so_and_is_itself_kept(path):
    found, (told,), measured = record(path, "pinned")
    assert set(found["chosen"].values()) == {"library"} and measured == [0, 0, 0]
    assert told["pinned"] == "MPITRAIN_ALLREDUCE=library" and told["before"] == "auto"
    found, told, measured = record(path, "pinned-again")
    assert set(found["chosen"].values()) == {"library"} and measured == [0, 0, 0] and told == []


def test_among_ranks_that_lie_otherwise_links_are_measured_anew_and_it_is_said(path):
    found, (told,), measured = record(path, "elsewhere")
    assert measured == [1, 1, 1] and found["nodes"] == [0, 1, 2]
    assert "other nodes" in told["before"]


def test_a_library_that_is_told_otherwise_is_reported(path):
    needs_open_mpi("tells Open MPI which algorithm to take")
    found, (told,), _ = record(path, "told-library")
    assert "coll_tuned" not in told["library"] and "may round otherwise" in told["library"]
    assert found["library"]["settings"]["OMPI_MCA_coll_tuned_allreduce_algorithm"] == "4"
    assert "Open MPI" in found["library"]["version"]


@pytest.mark.parametrize("kind", ["sharded", "localsgd", "tensor", "loop-allreduce", "loop-localsgd"])
def test_a_resume_takes_it_under_every_strategy_whose_ranks_add_together(path, kind):
    """Links are slow when the run begins, and fast when it goes on."""
    for name, measured in ((kind, True), (f"{kind}-again", False)):
        counts = [int((path / name / f"measured-{rank}").read_text()) for rank in range(3)]
        assert [count > 0 for count in counts] == [measured] * 3, counts
    assert same_model(path / kind / "model.safetensors", path / f"{kind}-again" / "model.safetensors")
    if not kind.startswith("loop"):
        first, _, _ = record(path, kind)
        again, told, _ = record(path, f"{kind}-again")
        assert again == first and "hierarchical" in first["chosen"].values() and told == []
