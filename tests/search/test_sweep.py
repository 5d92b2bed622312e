"""`mpitrain sweep`: what is refused before anything starts, and that every configuration is trained once, on this host
and by the ranks of a launch, whatever fails or is killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mpitrain.cli import main as cli
from mpitrain.reporting.targets import Choice
from mpitrain.search.sweep.axes import read_axis
from mpitrain.search.sweep.deal import MAX_DEATHS
from mpitrain.search.sweep.journal import Sweep
from mpitrain.search.sweep.proposals import Proposals
from tests.ranks import find_mpi, run_ranks

JOB = Path(__file__).with_name("job.py")
pytestmark = pytest.mark.usefixtures("warm_children")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(JOB, tmp_path / "job.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ended(folder: Path) -> Counter[tuple[int, str]]:
    """How often each configuration has ended, and how."""
    return Counter((row["number"], row["status"]) for row in Sweep(folder).rows() if row["event"] == "ended")


def starts(run_dir: Path) -> int:
    """How often a run was started, by its own account."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return sum(row["event"] == "start" for row in rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--vary", "lrr=1"], "did you mean 'lr'?"),
        (["--vary", "lr=1,x"], "configuration 1 (lr=x): argument --lr: 'x' is not a finite number"),
        (["--vary", "strategy=asinc()"], "did you mean 'async'?"),
        (["--vary", "strategy=async()"], "leave no worker"),
        (["--vary", "model.hiden=1"], "declares no such parameter; did you mean 'model.hidden'?"),
        (["--vary", "model.hidden=1,x"], "model.hidden is a whole number"),
        (["--vary", "lr=uniform(0, 1)"], "--sampler random"),
        (["--vary", "lr=1", "--vary", "lr=2"], "given twice"),
        (["--vary", "run_dir=a"], "no such option to vary"),
        (["--sampler", "random", "--vary", "lr=1,2"], "--num N"),
        (["--vary", "seed=1", "--seeds", "2"], "vary the same"),
        (["--asha", "asha(least=1)"], "a run has 1"),
        (["--asha", "ahsa()", "--epochs", "9"], "did you mean 'asha'?"),
        (["--asha", "asha()", "--vary", "epochs=3,9"], "leave epochs out"),
        (["--seeds", "0"], "at least 1"),
    ],
)
def test_a_wrong_plan_is_answered_before_anything_is_written(
    here: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sweep", "job.py", *words, "--run-dir", "out"]) == 2
    assert said in capsys.readouterr().err
    assert not (here / "out").exists()


def test_a_file_says_what_the_options_say(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "sweep.toml").write_text(
        'epochs = 2\nseeds = "2"\n[vary]\nlr = [0.1, 0.2]\nstrategy = ["allreduce()"]\n[vary.model]\nhidden = [3, 4]\n'
    )
    assert cli.main(["sweep", "job.py", "--config", "sweep.toml", "--dry-run"]) == 0
    by_file = capsys.readouterr().out
    words = ["--vary", "lr=0.1,0.2", "--vary", "strategy=allreduce()", "--vary", "model.hidden=3,4"]
    assert cli.main(["sweep", "job.py", "--epochs", "2", "--seeds", "2", *words, "--dry-run"]) == 0
    assert capsys.readouterr().out == by_file
    assert len(by_file.splitlines()) == 1 + 8


def test_a_local_sweep_reruns_what_has_failed_and_nothing_else(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", "job.py", "--vary", "model.hidden=3,4", "--set", "model.raises=4", "--run-dir", "out"]
    assert cli.main([*words, "--parallel", "2", "--json", "out.json"]) == 1
    said = capsys.readouterr().out
    assert "1 ok, 1 failed" in said and "1 failed: rank 0 (worker, step 0): RuntimeError: planted" in said
    assert ended(here / "out") == {(0, "ok"): 1, (1, "failed"): 1}
    figures = json.loads((here / "out.json").read_text())
    assert figures["best"] == [0] and figures["num_attempts"] == 2 and 0 <= figures["idle_share"] < 1
    assert cli.main(["sweep", "--run-dir", "out"]) == 1  # nothing is left to do
    assert ended(here / "out") == {(0, "ok"): 1, (1, "failed"): 1}
    (here / "FIXED").touch()
    assert cli.main(["sweep", "--run-dir", "out", "--rerun"]) == 0
    assert ended(here / "out") == {(0, "ok"): 1, (1, "failed"): 1, (1, "ok"): 1}
    assert starts(here / "out" / "0") == 1
    assert cli.main([*words, "--epochs", "2"]) == 2
    assert "another sweep lies in out: words was" in capsys.readouterr().err


def test_a_metric_that_is_not_measured_ends_the_sweep_at_its_first_run(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "sweep",
        "job.py",
        "--vary",
        "lr=0.1,0.2",
        "--metric",
        "acuracy",
        "--parallel",
        "1",
        "--run-dir",
        "out",
    ]
    assert cli.main(words) == 2
    assert "--metric 'acuracy': validation reports no metric of that name" in capsys.readouterr().err
    assert len(Sweep(here / "out").claims()) == 1


def test_ranks_of_a_launch_train_every_configuration_once_also_after_kills(here: Path) -> None:
    """One configuration raises, which its rank survives. One kills its process and so the launch, every time, until it
    is given up. All others are trained once, over all launches."""
    python = str(find_mpi()[0])
    words = [
        "sweep", "job.py", "--vary", "model.hidden=2,3,4,5,6,7,8,9", "--set", "model.raises=4",
        "--set", "model.kills=5", "--metric", "accuracy", "--run-dir", "out", "--json", "out.json",
    ]  # fmt: skip
    again = ["sweep", "--run-dir", "out", "--json", "out.json"]
    last, num_launches = run_ranks(4, [python, "-m", "mpitrain", *words], cwd=here), 1
    while not (here / "out.json").exists():  # which is written at the end of a launch that was not killed
        assert last.code != 0 and num_launches <= MAX_DEATHS, last
        last, num_launches = run_ranks(4, [python, "-m", "mpitrain", *again], cwd=here), num_launches + 1
    assert num_launches > 1
    assert last.code == 1 and "8 configurations: 6 ok, 2 failed" in last.stdout, last
    assert "3 failed: its process was killed" in last.stdout and "best: out/1" in last.stdout
    found = {place: count for place, count in ended(here / "out").items() if place[1] != "interrupted"}
    assert found == {(number, "failed" if number == 2 else "ok"): 1 for number in range(8) if number != 3}
    records = Sweep(here / "out").records()
    for task, how in records.ended.items():
        if how.status == "ok":  # nothing was begun after that, and every sample was trained on
            assert task.attempt == max(one.attempt for one in records.claimed if one.number == task.number)
            assert json.loads((here / "out" / str(task.number) / "result.json").read_text())["samples"] == 32


def test_groups_of_ranks_train_several_strategies(here: Path) -> None:
    """Two groups of two ranks; a parameter server is one of the two."""
    python = str(find_mpi()[0])
    words = [
        "sweep", "job.py", "--vary", "strategy=allreduce(),async(servers=1),localsgd()", "--seeds", "2",
        "--ranks-per-run", "2",
        "--run-dir", "out", "--json", "out.json",
    ]  # fmt: skip
    run_ranks(4, [python, "-m", "mpitrain", *words], cwd=here).check()
    figures = json.loads((here / "out.json").read_text())
    assert ended(here / "out") == {(number, "ok"): 1 for number in range(6)}
    assert len(figures["busy_s"]) == 2 and all(figures["busy_s"]) and 0 <= figures["idle_share"] < 1
    for number, (servers, seed) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1), (0, 0), (0, 1)]):
        result = json.loads((here / "out" / str(number) / "result.json").read_text())
        assert (result["servers"], result["workers"], result["seed"]) == (servers, 2 - servers, seed)
    refused = run_ranks(3, [python, "-m", "mpitrain", "sweep", "--run-dir", "out"], cwd=here)
    assert refused.code == 2 and "3 ranks make no groups of --ranks-per-run 2" in refused.stderr, refused


def test_early_stopping_trains_no_sample_twice_and_goes_on_from_checkpoints(here: Path) -> None:
    """Nine configurations, by accuracy 1.0 for `hidden` 3 and less for others: whatever the order of their ends, the
    best one is trained to its end."""
    python = str(find_mpi()[0])
    words = [
        "sweep", "job.py", "--vary", "model.hidden=1,2,3,4,5,6,7,8,9", "--metric", "accuracy", "--epochs", "9",
        "--asha", "asha(least=1, reduction=3)", "--run-dir", "out", "--json", "out.json",
    ]  # fmt: skip
    run_ranks(3, [python, "-m", "mpitrain", *words], cwd=here).check()
    figures = json.loads((here / "out.json").read_text())
    assert figures["rungs_epochs"] == [1, 3, 9] and figures["best"] == [2]
    rungs = {one["number"]: one["rung"] for one in figures["configurations"]}
    assert len(rungs) == 9 and rungs[2] == 2 and sum(rung > 0 for rung in rungs.values()) >= 3
    trained = Counter[int]()
    for task, how in Sweep(here / "out").records().ended.items():
        trained[task.number] += how.samples
    for number, rung in rungs.items():
        result = json.loads((here / "out" / str(number) / "result.json").read_text())
        assert trained[number] == result["samples"] == 32 * [1, 3, 9][rung]
        assert result["resumed_from"] == (None, 32, 32 * 3)[rung]
    assert figures["num_samples"] == sum(trained.values()) < 9 * 9 * 32
    statuses = {one["number"]: one["status"] for one in figures["configurations"]}
    assert all(statuses[number] == ("ok" if rung == 2 else "stopped") for number, rung in rungs.items())


def test_optuna_proposes_by_what_has_finished(here: Path) -> None:
    """Two ranks and a seed each: accuracy falls by 0.1 with each step of `hidden` from 3, and of what is proposed after
    ten random ones (TPE's start) most lie nearer to 3 than chance has it."""
    pytest.importorskip("optuna")
    python = str(find_mpi()[0])
    words = [
        "sweep", "job.py", "--vary", "model.hidden=integers(1, 40)", "--vary", "lr=log_uniform(1e-3, 1e-1)", "--metric",
        "accuracy", "--sampler", "optuna", "--num", "24", "--seeds", "2", "--run-dir", "out", "--json", "out.json",
    ]  # fmt: skip
    run_ranks(3, [python, "-m", "mpitrain", *words], cwd=here).check()
    figures = json.loads((here / "out.json").read_text())
    assert ended(here / "out") == {(number, "ok"): 1 for number in range(48)}
    hidden = [int(one["options"]["model.hidden"]) for one in figures["configurations"]]
    assert hidden[::2] == hidden[1::2]  # the two seeds of one proposal
    far = [abs(one - 3) for one in hidden[::2]]
    assert sum(far[14:]) / len(far[14:]) < 0.75 * sum(far[:10]) / 10

    import optuna
    from optuna.storages.journal import JournalFileBackend

    storage = optuna.storages.JournalStorage(JournalFileBackend(str(here / "out" / "optuna.journal")))
    trials = optuna.load_study(study_name="sweep", storage=storage).trials
    told = {trial.user_attrs["number"]: trial.value for trial in trials if trial.value is not None}
    assert told == {number: pytest.approx(1 - abs(hidden[number] - 3) / 10) for number in range(0, 48, 2)}


def test_two_dealers_may_tell_what_one_setting_has_reached(tmp_path: Path) -> None:
    """The one that comes second has looked before the first one told; a proposal that was not taken has failed."""
    pytest.importorskip("optuna")
    axes, sweep = [read_axis("lr=log_uniform(1e-3, 1e-1)")], SimpleNamespace(folder=tmp_path)
    plans: Any = [SimpleNamespace(axes=axes, sampler_seed=seed) for seed in range(2)]
    first, second = (Proposals(cast(Sweep, sweep), plan, Choice("accuracy", False)) for plan in plans)
    taken, other = first.ask(0), second.ask(0)
    first.ask(1)
    seen = second._study.get_trials(deepcopy=True)
    first.tell(0, taken, 0.5)
    second._study.get_trials = lambda **options: seen  # type: ignore[method-assign]
    second.tell(0, taken, 0.5)
    assert [trial.state.name for trial in first._study.trials] == ["COMPLETE", "FAIL", "RUNNING"]
    assert taken != other


def test_optuna_that_is_missing_is_named(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ["--vary", "lr=uniform(0, 1)", "--sampler", "optuna", "--num", "3"]
    assert cli.main(["sweep", "job.py", *words, "--run-dir", "out"]) == 2
    assert "pip install 'mpitrain[optuna]'" in capsys.readouterr().err


def test_folds_of_the_training_set(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """32 samples in 4 folds: each run trains on 24 and validates on the other 8. The best is a setting, not a fold."""
    python = str(find_mpi()[0])
    words = [
        "sweep",
        "job.py",
        "--vary",
        "lr=0.1,0.2",
        "--folds",
        "4",
        "--run-dir",
        "out",
        "--json",
        "j.json",
    ]
    said = run_ranks(2, [python, "-m", "mpitrain", *words], cwd=here).check().stdout
    found = json.loads((here / "j.json").read_text())
    means = [one["mean"] for one in found["settings"]]
    best = [one["numbers"] for one in found["settings"] if one["mean"] == min(means)]
    assert len(means) == 2 and found["best"] in best and len(found["best"]) == 4
    assert "2 settings, mean and spread over their seeds and folds:" in said
    assert ended(here / "out") == {(number, "ok"): 1 for number in range(8)}
    losses = set()
    for number in range(8):
        result = json.loads((here / "out" / str(number) / "result.json").read_text())
        assert result["samples"] == 24
        losses.add(result["metrics"]["validation_loss"])
    assert cli.main(["runs", "best", "out", "--metric", "validation_loss", "--over-seeds"]) == 0
    out, err = capsys.readouterr()
    assert [int(Path(line).name) for line in out.splitlines()] == found["best"]
    assert f"best of 2 settings: validation_loss {min(means):.6g} +- " in err and " over 4 runs; " in err
    assert len(losses) == 8  # each has validated on samples of its own
    assert cli.main(["runs", "table", "out"]) == 0
    said = capsys.readouterr().out
    assert "note:" not in said  # all settings have all folds
    assert "over seeds and folds:\nlr   runs  validation_loss mean  validation_loss spread" in said


def test_runs_that_outlive_their_sweep_are_waited_for_and_not_repeated(here: Path) -> None:
    """The sweep is killed when it has launched two runs, which go on without it."""
    python = str(find_mpi()[0])
    words = ["sweep", "job.py", "--vary", "lr=0.1,0.2,0.3", "--parallel", "2", "--run-dir", "out"]
    sweep = Sweep(here / "out")
    child = subprocess.Popen([python, "-m", "mpitrain", *words], cwd=here)
    try:
        while sum(row["event"] == "launched" for row in sweep.rows()) < 2:
            assert child.poll() is None
            time.sleep(0.05)
    finally:
        child.kill()
        child.wait()
    assert cli.main(["sweep", "--run-dir", "out", "--parallel", "2"]) == 0
    assert ended(here / "out") == {(number, "ok"): 1 for number in range(3)}
    assert all(starts(here / "out" / str(number)) == 1 for number in range(3))
    assert sorted(task.attempt for task in sweep.claims()) == [0, 0, 0, 1, 1]
