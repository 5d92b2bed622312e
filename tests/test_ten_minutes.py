"""`docs/ten-minutes.md` in a fresh folder: its blocks are the files that it names, its lines run in order."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import documented
from tests.documented import ROOT

PAGE = ROOT / "docs" / "ten-minutes.md"
SCRIPT, JOB, USE, NOTEBOOK = documented.blocks(PAGE, "python")
LINES = [line for block in documented.blocks(PAGE, "sh") for line in block.splitlines()]
UNPACKED = "    points, inside = batch\n    return nn"
# what a newcomer writes into the job or on the command line, and which row of the page answers
MISTAKES = [
    ("", "", "my_jbo.py", "no job file 'my_jbo.py'"),
    ("", "", "my_job.py --epoch 3", "unknown option '--epoch'; did you mean '--epochs'?"),
    ("", "", "my_job.py --strategy asinc()", "unknown name 'asinc' in 'asinc()'; did you mean 'async'?"),
    ("", "", "my_job.py --strategy async()", "1 server(s) on 1 rank(s) leave no worker"),
    ("\njob = ", "\nmine = ", "my_job.py", "no 'job'; a job file ends in"),
    (UNPACKED, UNPACKED.replace("= batch", '= batch["image"], 0'), "my_job.py", "loss asks for 'image'"),
    (
        "    return nn.functional.cross",
        "    nn.functional.cross",
        "my_job.py",
        "loss must return a tensor of one number",
    ),
    ("Linear(2, 64)", "Linear(3, 64)", "my_job.py", "mat1 and mat2 shapes cannot be multiplied"),
    ("", "", "my_job.py --set model.hidden=3", "declares no parameters"),
    ("", "", "my_job.py --target accuracy=0.999 --epochs 1", "is below 0.999"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in documented.files_of_newcomers(PAGE).items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_script_is_short_and_learns_what_the_job_learns_in_a_notebook(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(SCRIPT.splitlines()) <= 40
    exec(compile(SCRIPT, "script.py", "exec"), {"__name__": "script"})
    accuracies = [float(text) for text in re.findall(r"accuracy (\S+)", capsys.readouterr().out)]
    assert len(accuracies) == 5 and accuracies[-1] > 0.95
    names: dict = {}
    exec(compile(NOTEBOOK, "notebook", "exec"), names)
    assert names["result"]["metrics"]["accuracy"] > 0.8  # how far, asynchronously, hangs on who is held up
    assert not names["model"].training
    compile((folder / "loop.py").read_text(), "loop.py", "exec")
    here = USE.replace('"runs/one"', '"runs/notebook", job="my_job.py"')
    exec(compile(here, "use.py", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1] == "in the ring: True"


@pytest.mark.extended
def test_every_line_runs_as_printed_in_a_fresh_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    printed = documented.Folder(tmp_path_factory.mktemp("ten"))
    for name, text in documented.files_of_newcomers(PAGE).items():
        (printed.folder / name).write_text(text)
    (printed.folder / "slurm").unlink()  # a link to that of the checkout
    for line in LINES:
        out = "" if line.startswith("sbatch ") else printed.run(line)
        assert " train " not in line or " status=ok " in out, line
        assert not line.endswith("loop.py") or [one[:7] for one in out.splitlines()] == [
            "epoch 0",
            "epoch 1",
            "epoch 2",
            "epoch 3",
            "epoch 4",
        ]
    assert "in the ring: True" in printed.run("python use.py")
    assert (printed.folder / "slurm" / "site.sh").is_file() and (printed.folder / "runs.html").is_file()


@pytest.mark.extended
@pytest.mark.parametrize(("old", "new", "words", "said"), MISTAKES, ids=[said for *_, said in MISTAKES])
def test_the_messages_are_those_of_the_page(folder: Path, old: str, new: str, words: str, said: str) -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert any(said in row for row in rows)
    assert JOB.count(old) == 1 or not old
    (folder / "my_job.py").write_text(JOB.replace(old, new) if old else JOB)
    command = [sys.executable, "-m", "mpitrain", "train", *words.split(" ")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and said in done.stderr
