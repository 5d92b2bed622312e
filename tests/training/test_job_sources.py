"""Where a job stands: in a file, under a name in it, or in a module; and what a run says of it, so that it is found."""

import copy
import json
import pickle
import sys
import types
from pathlib import Path

import pytest
import torch

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.system.files.job_source import find_job
from mpitrain.training.job_file import load_job

JOB = """
from tests import toy
import mpitrain as mt
from .{parts} import WIDTH
model = mt.Options("model", hidden=WIDTH)
def wide():
    return toy.make_job(model=lambda: toy.perceptron(), options={{}})
job = toy.make_job(name="named")
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `pkg_of_jobs` with a module `inner.jobs`, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    inner = tmp_path / "pkg_of_jobs" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    (inner / "jobs.py").write_text(JOB.format(parts="parts"))
    (inner / "parts.py").write_text("WIDTH = 7\n")
    (tmp_path / "alone.py").write_text(
        JOB.format(parts="parts").replace("from .parts import WIDTH", "WIDTH = 3")
    )
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("pkg_of_jobs")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "file", "name", "options"),
    [
        ("alone.py", "alone.py", "named", {"model.hidden": 3}),
        ("alone.py:wide", "alone.py", "wide", {"model.hidden": 3}),
        ("pkg_of_jobs.inner.jobs", "pkg_of_jobs/inner/jobs.py", "named", {"model.hidden": 7}),
        ("pkg_of_jobs.inner.jobs:wide", "pkg_of_jobs/inner/jobs.py", "wide", {"model.hidden": 7}),
    ],
)
def test_a_job_is_found_by_file_by_module_and_by_name_from_any_folder(
    package, text, file, name, options, monkeypatch
):
    source = find_job(text)
    assert source.file.resolve() == package / file
    job = load_job(text)
    assert job.name == name and dict(job.options) == options
    place = str(source)
    monkeypatch.chdir("/")
    assert load_job(place, ["model.hidden=5"]).options == {"model.hidden": 5}


def test_where_python_imports_from_keeps_its_order_and_a_package_of_elsewhere_is_no_module_of_this_place(
    package, monkeypatch
):
    monkeypatch.chdir("/")
    sys.path.append(str(package))
    before = list(sys.path)
    assert load_job("pkg_of_jobs.inner.jobs").name == "named" and sys.path == before
    other = package / "other" / "pkg_of_jobs" / "inner"
    other.mkdir(parents=True)
    (other / "jobs.py").write_text(JOB.format(parts="parts"))
    with pytest.raises(UsageError, match=f"and not the module below {package / 'other'}: rename"):
        load_job(f"{package}/other/pkg_of_jobs.inner.jobs")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gone.py", "no job file 'gone.py' "), ("gone.py:job", "no job file 'gone.py' "),
        ("pkg_of_jobs.gone:wide", "no job file 'pkg_of_jobs.gone', nor a module of this name"),
        ("pkg_of_jobs.inner.jobs:narrow", "jobs.py: no 'narrow'"), ("alone.py:model", "alone.py: 'model' is Options"),
    ],
)  # fmt: skip
def test_a_place_without_a_job_is_told(package, text, said):
    with pytest.raises(UsageError, match=said):
        load_job(text)


def test_a_script_without_a_job_is_told_how_it_is_launched(tmp_path):
    (tmp_path / "loop.py").write_text("losses = []\n")
    with pytest.raises(UsageError, match=r"no 'job'; .*is launched: mpitrain launch -n 4 \S*loop.py"):
        load_job(str(tmp_path / "loop.py"))


def test_a_file_of_that_name_is_meant_literally(package):
    (package / "alone.py:wide").write_text("from tests import toy\njob = toy.make_job(name='odd')\n")
    assert load_job("alone.py:wide").name == "odd"


ARGPARSE = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=8)
parser.add_argument("--rate", type=float)
parser.add_argument("--deep", action="store_true")
arguments = parser.parse_args({words})
from tests import toy
job = toy.make_job()
"""


def test_a_parser_in_a_job_file_is_told_what_to_write_in_its_place(tmp_path, capsys):
    file = tmp_path / "parsing.py"
    file.write_text(ARGPARSE.format(words=""))
    said = r'parsing.py, line 7: parse_args\(\).*`args = mpitrain.Options\("args", hidden=8, rate=0.1, deep=False\)`'
    with pytest.raises(UsageError, match=said + r".*--set args.hidden=8"):
        load_job(str(file))
    assert capsys.readouterr() == ("", "")
    file.write_text(ARGPARSE.format(words="['--hidden', '9']"))  # words of its own
    assert load_job(str(file)).name == "parsing"
    file.write_text("raise SystemExit(2)\n")
    with pytest.raises(UsageError, match=r"exits \(2\).*mpitrain.Options declares its parameters, and --set"):
        load_job(str(file))


SCRIPT = """
from tests import toy
import mpitrain as mt
mine = toy.make_job(validate=toy.Memory(8))
if __name__ == "__main__":
    mt.train(mine, threads=1, quiet=True)
"""


def test_a_run_that_a_script_has_started_is_loaded_by_the_scripts_variable(tmp_path, monkeypatch, capsys):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    exec(compile(SCRIPT, str(script), "exec"), vars(main))
    told = capsys.readouterr()
    assert told == ("", "")  # `quiet`
    vars(main).pop("mine")  # as in another process: this one knows what it has trained
    (run,) = Path("runs").iterdir()
    assert json.loads((run / "run.json").read_text())["made_in"] == f"{script}:mine"
    assert isinstance(mt.load(run), torch.nn.Module)
    script.write_text(SCRIPT.replace('if __name__ == "__main__":', "if True:"))
    with pytest.raises(UsageError, match="has changed since"):
        mt.load(run)
    with pytest.raises(UsageError, match=r'train is called while.*under `if __name__ == "__main__":`'):
        mt.load(run, f"{script}:mine")
    script.unlink()
    with pytest.raises(UsageError, match="is gone"):
        mt.load(run)


def test_a_run_whose_job_is_no_variable_says_how_to_name_it(tmp_path):
    from tests import toy

    job = toy.make_job()
    result = mt.train(job, threads=1, quiet=True, run_dir=str(tmp_path / "run"))
    for known in (result, tmp_path / "run"):  # who has trained it, such as a notebook, names nothing
        assert isinstance(mt.load(known), torch.nn.Module)
    del job
    assert isinstance(mt.load(result), torch.nn.Module)  # of a job that was made in the call
    copies = [copy.deepcopy(result), pickle.loads(pickle.dumps(result)), json.loads(json.dumps(result))]
    assert all(type(one) is dict and one == result for one in copies)
    del result
    with pytest.raises(UsageError, match="no variable of a script.*--job FILE:NAME"):
        mt.load(tmp_path / "run")
