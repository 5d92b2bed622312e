"""`mpitrain compare`: what is within a tolerance, what is worse, and what cannot be compared."""

import json

import pytest

from mpitrain.cli.main import main
from mpitrain.errors import UsageError
from mpitrain.reporting.run_differences import Tolerance, read_tolerances

RESULT = {
    "status": "ok", "exit_code": 0, "failure": "", "job": "digits", "strategy": "sync(servers=1)", "workers": 2,
    "strategy_asked": "sync()", "servers": 1, "batch_size": 32, "accumulate": 1, "precision": "float32", "seed": 1,
    "epochs": 3, "options": {"model.hidden": 8}, "samples_per_second": 100.0,
    "metrics": {"accuracy": 0.9, "validation_loss": 0.4},
}  # fmt: skip


def write(path, environment=None, overrides=None, **changes):
    path.mkdir()
    (path / "result.json").write_text(json.dumps(RESULT | changes))
    if environment is not None:
        (path / "env.json").write_text(json.dumps(environment))
        (path / "run.json").write_text(json.dumps({"overrides": overrides or {}}))
    return str(path)


@pytest.fixture
def beside(tmp_path, capsys):
    """The exit code of a comparison with `RESULT`, and what is said."""

    def run(*words, **changes):
        for path in ("first", "second"):
            for file in (tmp_path / path).glob("*"):
                file.unlink()
            if (tmp_path / path).exists():
                (tmp_path / path).rmdir()
        first, second = write(tmp_path / "first"), write(tmp_path / "second", **changes)
        code = main(["compare", first, second, *words])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def metrics(accuracy=0.9, loss=0.4):
    return {"metrics": {"accuracy": accuracy, "validation_loss": loss}}


WITHIN = {
    "equal": ((), {}, 0),
    "at the edge, above": ((), {"samples_per_second": 105.0}, 0),
    "at the edge, below": ((), {"samples_per_second": 95.0}, 0),
    "beyond, above": ((), {"samples_per_second": 105.1}, 1),
    "beyond, below": ((), {"samples_per_second": 94.9}, 1),
    "a wider one": (("--tolerance", "6%"), {"samples_per_second": 94.9}, 0),
    "absolute": (("--tolerance", "accuracy=0.01"), metrics(0.9095), 0),
    "absolute, beyond": (("--tolerance", "accuracy=0.01"), metrics(0.911), 1),
    "of one figure alone": (("--tolerance", "accuracy=50%"), {"samples_per_second": 94.9, **metrics(0.6)}, 1),
    "none at all": (("--tolerance", "0"), metrics(0.9000001), 1),
    "better": (("--worse-only",), {"samples_per_second": 200.0, **metrics(0.99, 0.1)}, 0),
    "a worse rate": (("--worse-only",), {"samples_per_second": 50.0}, 1),
    "a worse accuracy": (("--worse-only",), metrics(0.8), 1),
    "a worse loss": (("--worse-only",), metrics(loss=0.5), 1),
    "no number": (("--tolerance", "999%"), metrics(loss="nan"), 1),
    "no number is no better": (("--worse-only",), metrics(accuracy="inf"), 1),
    "a missed target": ((), {"status": "missed", "exit_code": 3}, 0),
    "another seed": ((), {"seed": 2}, 0),
    "across strategies": (("--across", "strategy,workers"), {"strategy_asked": "async()", "workers": 4}, 0),
}  # fmt: skip


@pytest.mark.parametrize(("words", "changes", "code"), WITHIN.values(), ids=WITHIN)
def test_the_exit_code_says_whether_all_figures_are_within(beside, words, changes, code):
    found, said = beside(*words, **changes)
    assert found == code, said
    assert said.count(" beyond\n") == 0 if code == 0 else said.count(" beyond\n") >= 1
    assert (
        sum(said.count(f"\n{name} ") for name in ("samples_per_second", "accuracy", "validation_loss")) == 3
    )
    assert all(len(line) <= 80 for line in said.splitlines()[2:])


REFUSED = {
    "job": {"job": "charnn"}, "strategy": {"strategy_asked": "async()"}, "batch_size": {"batch_size": 16},
    "workers": {"workers": 4}, "precision": {"precision": "bfloat16"}, "model.hidden": {"options": {"model.hidden": 9}},
    "virtual": {"virtual": True}, "synthetic": {"synthetic": True},
}  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), REFUSED.items(), ids=REFUSED)
def test_another_setting_is_not_comparable_and_may_be_allowed(beside, name, changes):
    code, said = beside(**changes)
    assert code == 2 and "first and second are not comparable: " + name in said and f"--across {name}" in said
    code, said = beside("--across", name, **changes)
    assert code == 0 and f"\n  {name}: " in said


BROKEN = {
    "failed": (
        {"exit_code": 1, "status": "fail", "failure": "the loss is nan"},
        "has failed: the loss is nan",
    ),
    "unfinished": ({"exit_code": 75, "status": "requeue"}, "is not finished"),
    "measured less": ({"metrics": {"accuracy": 0.9}}, "only one of them has measured validation_loss"),
    "no result of a run": ({"metrics": None}, "its result has no metrics and samples_per_second"),
}


@pytest.mark.parametrize(("changes", "said"), BROKEN.values(), ids=BROKEN)
def test_a_result_that_is_none_is_not_comparable(beside, changes, said):
    code, text = beside(**changes)
    assert code == 2 and said in text


def test_files_and_what_is_no_run(tmp_path, capsys):
    first, second = write(tmp_path / "a"), write(tmp_path / "b", samples_per_second=50.0)
    (tmp_path / "torn.json").write_text(json.dumps(RESULT)[:-9])
    assert main(["compare", f"{first}/result.json", second]) == 1
    assert main(["compare", second, f"{second}/result.json", "--json", str(tmp_path / "found.json")]) == 0
    record = json.loads((tmp_path / "found.json").read_text())
    assert record["is_within"] and [one["tolerance"] for one in record["figures"]] == ["5%"] * 3
    capsys.readouterr()
    for path, said in (
        (tmp_path / "torn.json", "torn.json is no JSON object"), (tmp_path / "none", "is not there"),
        (tmp_path, "holds 2 runs"),
    ):  # fmt: skip
        assert main(["compare", first, str(path)]) == 2
        assert said in capsys.readouterr().err


def test_what_else_differs_is_listed(tmp_path, capsys):
    first = write(
        tmp_path / "a", {"packages": {"torch": "2.13.0", "numpy": "2.4.6"}, "command": ["x"], "git": {"mpitrain": "1"}},
        {"seed": 1, "run_dir": "a", "clip_norm": None},
    )  # fmt: skip
    second = write(
        tmp_path / "b", {"packages": {"torch": "2.14.0", "numpy": "2.4.6"}, "command": ["y"], "git": {"mpitrain": "2"}},
        {"seed": 1, "run_dir": "b", "clip_norm": 1.0},
    )  # fmt: skip
    assert main(["compare", first, second]) == 0
    said = capsys.readouterr().out.splitlines()
    listed = said[said.index("what else differs:") + 1 : -2]
    assert listed == ["  clip_norm: None | 1.0", "  packages.torch: 2.13.0 | 2.14.0", "  git.mpitrain: 1 | 2"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tolerance", "5 percent"], 'write "5%"'),
        (["--tolerance=-5%"], 'write "5%"'),
        (["--tolerance", "accurate=5%"], "no such figure; did you mean 'accuracy'"),
        (["--across", "worker"], "did you mean 'workers'"),
    ],
)
def test_what_cannot_be_asked_for(beside, words, said):
    code, text = beside(*words)
    assert code == 2 and said in text


def test_tolerances_are_shares_or_numbers():
    assert read_tolerances([]) == {"": Tolerance(0.05, True)}
    found = read_tolerances(["1%", "a=b=0.5", "loss = 3 %"])
    assert found == {"": Tolerance(0.01, True), "a=b": Tolerance(0.5, False), "loss": Tolerance(0.03, True)}
    assert Tolerance(0.05, True).admits(-100, -105) and not Tolerance(0.05, True).admits(0, 1e-9)
    assert Tolerance(0.05, True).admits(0, 0)
    with pytest.raises(UsageError, match="nan"):
        read_tolerances(["nan"])
