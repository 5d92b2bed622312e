"""A job file is a module that processes find which are not forked, with the modules beside it and its settings."""

import multiprocessing
import pickle
import sys
from pathlib import Path

import pytest

from mpitrain.data.sources import open_source
from mpitrain.errors import UsageError
from mpitrain.system.files.user_module import UNNAMED, run_file
from mpitrain.training.job_file import load_job


@pytest.fixture(autouse=True)
def same_modules_after(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("MPITRAIN_JOB_SETTINGS", raising=False)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("own_", "beside_")):
            del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("stem", ["own_job", "own-job"])
def test_functions_of_the_file_and_of_modules_beside_it_are_found(tmp_path, method, stem):
    write(tmp_path / "beside_it.py", "def double(x): return 2 * x\n")
    text = "from beside_it import double\ndef one(x): return double(x) + 1\nclass Held:\n    at = 7\n"
    made = run_file(write(tmp_path / f"{stem}.py", text))
    assert pickle.loads(pickle.dumps(made["Held"]())).at == 7
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(made["one"], (4,)) == 9 and pool.apply(made["double"], (4,)) == 8
        assert type(pool.apply(made["Held"])) is made["Held"]


@pytest.mark.parametrize("name", ["statistics.py", "json.py", "pytest.py", "own.job.py", "own_text"])
def test_no_other_module_is_replaced_or_hidden(tmp_path, name):
    before = sys.modules.get(Path(name).stem)
    made = run_file(write(tmp_path / name, "where = __file__\n"))
    assert made["__name__"] == UNNAMED and made["where"] == str(tmp_path / name)
    assert sys.modules.get(Path(name).stem) is before and sys.path[-1] == str(tmp_path)


def test_each_run_is_anew_and_one_that_fails_leaves_no_trace(tmp_path):
    file = write(tmp_path / "own_job.py", "x = []\n")
    first, paths = run_file(file), None
    assert run_file(file)["x"] is not first["x"] and sys.path.count(str(tmp_path)) == 1
    kept, paths = sys.modules["own_job"], list(sys.path)
    write(file, "x = 1\nraise LookupError\n")
    with pytest.raises(LookupError):
        run_file(file)
    assert sys.modules["own_job"] is kept and sys.path == paths


JOB = """
import torch, mpitrain as mt
from beside_data import Mine
scale = mt.Options("scale", by=1.0)
def pad(samples): return {"x": torch.stack(samples) * scale.by}
loader = torch.utils.data.DataLoader(Mine(), 8, shuffle=True, num_workers=1, multiprocessing_context="spawn",
                                     collate_fn=pad)
job = mt.Job(model=torch.nn.Module, loss=print, optimizer=print, epochs=1, data=loader)
"""


def test_a_loaders_spawned_process_has_the_classes_and_the_settings_of_the_job(tmp_path):
    text = "import torch\nclass Mine:\n    def __len__(self): return 16\n"
    text += "    def __getitem__(self, i): return torch.ones(2)\n"
    write(tmp_path / "beside_data.py", text)
    job = load_job(str(write(tmp_path / "own_job.py", JOB)), ["scale.by=2.5"])
    with job.data.reader(job.data.scan(), 0) as reader:
        assert reader.batch(0, 0, 8)["x"].unique().tolist() == [2.5]
    assert load_job(str(tmp_path / "own_job.py")).options == {"scale.by": 1.0}


def test_a_python_source_finds_what_lies_beside_it(tmp_path):
    write(tmp_path / "beside_values.py", "values = [1.0, 2.0, 3.0]\n")
    write(tmp_path / "own_source.py", "from beside_values import values\ndef made(): return {'x': values}\n")
    assert open_source(f"{tmp_path}/own_source.py:made").num_samples == 3
    with pytest.raises(UsageError, match="has no 'other'"):
        open_source(f"{tmp_path}/own_source.py:other")
