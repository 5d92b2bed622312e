"""Parameters that a job file declares, `--set`, `--config`, and which of them replaces which."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.cli import main as cli
from mpitrain.errors import UsageError
from mpitrain.training.job_file import load_job

JOB = """
import mpitrain as mt
from tests import toy

shape = mt.Options("model", hidden=5, rate=0.5, sizes=[4, 2], title="a b", deep=False)
data = mt.Options("data", scale=1.0)
job = toy.make_job(model=lambda: toy.wide(shape.hidden))
"""
DEFAULTS = {
    "model.hidden": 5, "model.rate": 0.5, "model.sizes": (4, 2), "model.title": "a b", "model.deep": False,
    "data.scale": 1.0,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def simulate(*words: str) -> int:
    strategy = ["--strategy", "async()", "--workers", "2", "--quiet", "--steps", "2", "--run-dir", "run"]
    return cli.main(["simulate", "job.py", *strategy, *words])


def result() -> dict[str, object]:
    return dict(json.loads(Path("run/result.json").read_text()))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("model.hidden=7", 7),
        ("model.hidden=-7", -7),
        ("model.rate=2", 2.0),
        ("model.rate=1e-3", 1e-3),
        ("model.sizes=[]", ()),
        ("model.sizes=[1, 2, 3]", (1, 2, 3)),
        ("model.title=", ""),
        ("model.title=7", "7"),
        ("model.title=x=y", "x=y"),
        ("model.deep=true", True),
        (" data.scale=3", 3.0),
    ],
)
def test_a_setting_is_read_as_its_default_is(folder: Path, text: str, value: object) -> None:
    name = text.partition("=")[0].strip()
    read = load_job("job.py", [text]).options
    assert read == DEFAULTS | {name: value} and type(read[name]) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "model.hidden=1.5", "model.hidden=true", "model.hidden=seven", "model.hidden=", "model.rate=NaN",
        "model.rate=[1]", "model.deep=1", "model.deep=True", "model.sizes=3", 'model.sizes=["a"]',
        "model.sizes=[1.5]", "model.sizes=[true]", "model.hiden=3", "hidden=3", "modle.hidden=3", "scale=3",
    ],
)  # fmt: skip
def test_what_is_not_declared_so_names_what_is_and_exits_with_2(
    folder: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate("--set", text) == 2
    said = capsys.readouterr().err
    assert f"--set {text.partition('=')[0]}" in said and all(name in said for name in DEFAULTS), said


def test_a_setting_without_a_value_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--set", "model.hidden") == 2 and "GROUP.NAME=VALUE" in capsys.readouterr().err


def test_a_file_without_declarations_says_how_to_declare(folder: Path) -> None:
    (folder / "job.py").write_text("from tests import toy\njob = toy.make_job()\n")
    with pytest.raises(UsageError, match=r"declares no parameters; mpitrain.Options\(\"model\", hidden=64\)"):
        load_job("job.py", ["model.hidden=3"])
    assert load_job("job.py").options == {}


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ('mt.Options("model", hidden=1)', "declares model.hidden twice"),
        ('mt.Options("other", at=None)', "other.at needs a default from which its type can be told"),
        ('mt.Options("other", at=[None])', "other.at must hold numbers"),
        ('mt.Options("a.b", at=1)', "the group must be a word"),
        ('mt.Options("other")', "Options: say which"),
        ('mt.Options("other", values=3)', "other.values: this name is a method's"),
        ('mt.Options("other", _values=3)', "other._values: this name is a method's"),
    ],
)
def test_a_wrong_declaration_is_refused(folder: Path, declaration: str, message: str) -> None:
    (folder / "job.py").write_text(JOB + declaration + "\n")
    with pytest.raises(UsageError, match=message):
        load_job("job.py")


def test_declarations_outside_a_job_file_have_their_defaults_and_are_mappings() -> None:
    options = mt.Options("model", hidden=3, sizes=[1])
    assert dict(**options) == {"hidden": 3, "sizes": (1,)} and options.hidden == 3
    with pytest.raises(AttributeError, match="did you mean 'hidden'"):
        _ = options.hiden
    assert mt.Options("model", hidden=4).hidden == 4  # nothing is noted outside


# ---- the file


def parsed(*words: str) -> dict[str, object]:
    return vars(cli.parse(["train", "job.py", *words]))


def test_a_configuration_says_what_the_command_line_would(folder: Path) -> None:
    (folder / "c.toml").write_text(
        'strategy = "sync()"\nepochs = 3\nbatch_size = 4\nlr = 0.25\nquiet = true\nsynthetic = false\n'
        'target = ["accuracy=0.5", "validation_loss<2"]\nlog = "csv"\nwatchdog-s = 5\n'
        '[model]\nhidden = 9\ndeep = true\nsizes = [1, 2]\ntitle = "x"\n[data]\nscale = 0.5\n'
    )
    words = [
        "--strategy=sync()", "--epochs=3", "--batch-size=4", "--lr=0.25", "--quiet", "--target=accuracy=0.5",
        "--target=validation_loss<2", "--log=csv", "--watchdog-s=5", "--set=model.hidden=9", "--set=model.deep=true",
        "--set=model.sizes=[1, 2]", "--set=model.title=x", "--set=data.scale=0.5",
    ]  # fmt: skip
    left_out = {"config", "parser", "parse"}
    told = {key: value for key, value in parsed("--config", "c.toml").items() if key not in left_out}
    assert told == {key: value for key, value in parsed(*words).items() if key not in left_out}


def test_the_command_line_comes_before_the_file_and_the_file_before_the_job(folder: Path) -> None:
    (folder / "c.toml").write_text('epochs = 3\ntarget = ["loss<1"]\n[model]\nhidden = 9\nrate = 0.125\n')
    told = parsed("--set", "model.hidden=11", "--config=c.toml", "--epochs", "4", "--target", "loss<2")
    assert (told["epochs"], told["target"]) == (4, ["loss<2"])
    options = load_job("job.py", told["options"]).options  # type: ignore[arg-type]
    assert options == DEFAULTS | {"model.hidden": 11, "model.rate": 0.125}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3", "mpitrain train has no option --epoch; did you mean '--epochs'?"),
        ("config = 'd.toml'", "has no option --config"),
        ("epochs = 0", "epochs: '0' is not a whole number of at least 1"),
        ("epochs = true", "epochs takes a number or a text, got True"),
        ("epochs = [1, 2]", "epochs takes a number or a text, got [1, 2]"),
        ("quiet = 1", "quiet is true or false, got 1"),
        ("[epochs]\nx = 1", "epochs takes a number or a text"),
        ("[model]\nat = 1979-05-27", "model.at must be a number, a text"),
        ("epochs = ", "this is no TOML"),
    ],
)
def test_a_wrong_configuration_names_the_file_and_exits_with_2(
    folder: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "c.toml").write_text(text + "\n")
    with pytest.raises(SystemExit) as end:
        parsed("--config", "c.toml")
    said = capsys.readouterr().err
    assert end.value.code == 2 and message in said and "c.toml" in said, said


def test_a_configuration_that_is_not_there_or_no_text_exits_with_2(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "c.toml").write_bytes(b"\xff\xfe")
    for name, message in (("d.toml", "No such file"), ("c.toml", "no TOML"), (".", "Is a directory")):
        with pytest.raises(SystemExit) as end:
            parsed("--config", name)
        assert end.value.code == 2 and message in capsys.readouterr().err


def test_launch_reads_the_configuration_of_the_command_it_starts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "c.toml").write_text('run-dir = "here"\n')
    assert cli.main(["launch", "-n", "2", "--dry-run", "train", "job.py", "--config", "c.toml"]) == 0
    assert f"MPITRAIN_RUN_DIR={folder}/here" in capsys.readouterr().out


# ---- what a run does with them


def test_parameters_reach_the_model_of_a_run_and_the_plan(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "c.toml").write_text("[model]\nhidden = 9\n")
    assert simulate("--config", "c.toml", "--set", "data.scale=2") == 0
    assert result()["options"] == {**DEFAULTS, "model.sizes": [4, 2], "model.hidden": 9, "data.scale": 2.0}
    assert load_file("run/model.safetensors")["0.weight"].shape == (9, 5)
    plans = []
    for words in ([], ["--config", "c.toml"]):
        assert cli.main(["train", "job.py", "--dry-run", *words]) == 0
        plans.append(capsys.readouterr().out)
    assert plans[0] != plans[1]


def test_slurm_passes_names_with_a_dot_on_to_train(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "model.hidden=9", "--set", "nodes=3"]
    assert cli.main(["slurm", "render", *settings, "multi-node", "job.py", "--epochs", "2"]) == 0
    script = capsys.readouterr().out
    assert "job.py --set=model.hidden=9 --epochs 2" in script and "#SBATCH --nodes=3" in script
    assert cli.main(["slurm", "render", *settings, "multi-node"]) == 2
    assert "--set=model.hidden=9 is for the job file" in capsys.readouterr().err
