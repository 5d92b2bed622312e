"""The ranking job: its generator and its reader of Criteo's columns, and what several workers make of it."""

import runpy

import pytest

import mpitrain as mt
from mpitrain.cli.main import main
from mpitrain.training.job_file import load_job
from mpitrain.values import parse
from tests.ranks import ROOT
from tests.sampling import sampled

JOB = str(ROOT / "jobs" / "ranking.py")
LINE = "\t".join(["1", "-2", "", *["7"] * 11, "68fd1e64", "", *["0b153874"] * 24])


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Where the clicks are packed, once for all tests."""
    folder = tmp_path_factory.mktemp("ranking")
    with pytest.MonkeyPatch.context() as patch:
        small_in(folder, patch)
        assert main(["data", "pack", f"{JOB}:clicks", "data/ranking"]) == 0
    return folder


@pytest.fixture(scope="module")
def one(packed):
    """What one process learns of them."""
    with pytest.MonkeyPatch.context() as patch:
        small_in(packed, patch)
        return trained("of 1", 1)


@pytest.fixture
def clicks(packed, monkeypatch):
    small_in(packed, monkeypatch)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    small_in(tmp_path, monkeypatch)
    return tmp_path


def small_in(path, patch):
    patch.chdir(path)
    patch.setenv("RANKING_SAMPLES", "40000")
    patch.setenv("RANKING_ROWS", "16384")


def trained(name, workers, **changes):
    job = load_job(JOB)
    result = mt.simulate(
        job, mt.AllReduce(), workers=workers, run_dir=name, quiet=True, batch_size=128 // workers, **changes
    )
    assert not result["failure"]
    return result["metrics"]


def test_several_workers_learn_what_one_learns_and_most_of_what_can_be_known(clicks, one):
    four = trained("of 4", 4)
    assert four["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-3)
    assert four["gap_closed"] > 0.8


def test_clicks_are_as_likely_as_their_best_loss_says(folder):
    made = runpy.run_path(JOB)["clicks"]()
    rate = made["clicked"].mean()
    entropy = runpy.run_path(JOB)["entropy"]
    assert made["base"][0] == pytest.approx(entropy(rate), rel=1e-4)
    assert 0 < made["best"][0] < made["base"][0]
    counts = [(made["ids"][:, field] == 0).mean() for field in range(5)]
    assert (
        counts == sorted(counts, reverse=True) and counts[-1] > 0.1
    )  # the first of 50,000 is a fifth of all


def test_criteo_s_columns_are_read_and_a_line_that_is_none_is_named(folder, monkeypatch):
    monkeypatch.setenv("RANKING_CRITEO", "clicks.txt")
    (folder / "clicks.txt").write_text("\n".join([LINE] * 300 + [LINE.replace("1", "0", 1)] * 300) + "\n")
    assert main(["data", "pack", f"{JOB}:criteo", "data/ranking"]) == 0
    metrics = trained("criteo", 2, epochs=1)
    assert metrics.keys() == {"validation_loss"} and 0 < metrics["validation_loss"] < 1
    (folder / "clicks.txt").write_text(LINE + "\n" + LINE.removesuffix("\t0b153874") + "\n")
    with pytest.raises(ValueError, match=r"clicks.txt, line 2: want 0 or 1, 13 numbers and 26 categories"):
        main(["data", "pack", f"{JOB}:criteo", "data/other"])


@pytest.mark.parametrize(
    ("text", "served"),
    sampled(
        [(text, served) for text in ("sync(servers=2)", "async(servers=2)") for served in "01"],
        [("async(servers=2)", "1")],
    ),
)
def test_tables_on_servers_learn_what_one_process_learns(clicks, one, monkeypatch, text, served):
    monkeypatch.setenv("RANKING_SERVED", served)
    job, run_dir = load_job(JOB), f"{text} {served}"
    found = mt.simulate(job, parse(text, "strategy"), workers=4, run_dir=run_dir, quiet=True, batch_size=32)
    assert not found["failure"] and found["metrics"]["gap_closed"] > 0.8
    assert found["metrics"]["validation_loss"] == pytest.approx(one["validation_loss"], rel=0.01)
