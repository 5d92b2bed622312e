"""`mpitrain examples`: the jobs of the checkout, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.cli.main import main
from tests.documented import ROOT


def test_the_examples_are_the_jobs_of_the_checkout_and_overwrite_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["examples"]) == 0
    said = capsys.readouterr().out.splitlines()
    found = [path for pattern in ("*.py", "scripts/*.py") for path in (ROOT / "jobs").glob(pattern)]
    jobs = {path.relative_to(ROOT) for path in found}  # what jobs/troubles shows is of a checkout
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()} == jobs
    assert all(path.read_bytes() == (ROOT / path).read_bytes() for path in jobs)
    assert {Path(line.split()[0]) for line in said} == jobs
    Path("other").mkdir()
    Path("other/digits.py").symlink_to("nowhere")
    Path("file").write_text("")
    for folder, why in (
        ("jobs", "jobs/digits.py and "),
        ("other", "other/digits.py: already there, and nothing was written"),
        ("file", "cannot write file"),
    ):
        assert main(["examples", folder]) == 2
        assert why in capsys.readouterr().err
    assert list(Path("other").iterdir()) == [Path("other/digits.py")]
