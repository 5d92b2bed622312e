"""`mpitrain predict`, alone and by several ranks: what is computed, what is refused, and that nothing half stays."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from mpitrain.cli import main as cli
from mpitrain.data.write.rows import join_rows, write_rows
from mpitrain.errors import UsageError
from mpitrain.training.trained.predict import share_of
from tests.ranks import find_mpi, run_ranks

JOB = """
import torch
from torch import nn
import mpitrain as mt

shape = mt.Options("model", hidden=6)

def loss(model, batch):
    return ((model(batch["x"]).squeeze(1) - batch["y"]) ** 2).mean()

job = mt.Job(
    model=lambda: nn.Sequential(nn.Linear(3, shape.hidden), nn.Tanh(), nn.Dropout(0.5), nn.Linear(shape.hidden, 1)),
    loss=loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    data=mt.Shards("data/train-*.h5"),
    batch_size=8,{more}
)
"""
SAMPLES = 40


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shards, a job and a finished run of it with other parameters than the job file's."""
    folder = tmp_path_factory.mktemp("made")
    torch.manual_seed(0)
    arrays = {"x": torch.randn(SAMPLES, 3), "y": torch.randn(SAMPLES)}
    mt.pack({name: one.numpy() for name, one in arrays.items()}, folder / "data", shard_samples=13)
    (folder / "job.py").write_text(JOB.replace("{more}", ""))
    words = [
        "train",
        "job.py",
        "--strategy",
        "async()",
        "--quiet",
        "--run-dir",
        "run",
        "--set",
        "model.hidden=4",
    ]
    mpitrain = [str(find_mpi()[0]), "-m", "mpitrain"]
    run_ranks(2, [*mpitrain, *words], cwd=folder).check()
    for size in (2, 3):
        words = ["predict", "run", "data", "-o", f"by-{size}.h5", "--batch-size", "6"]
        said = run_ranks(size, [*mpitrain, *words], cwd=folder).check().ranks_out
        assert said == (f"by-{size}.h5: {SAMPLES} samples: prediction (1,) float32\n", *[""] * (size - 1))
    wrong = run_ranks(2, [*mpitrain, "predict", "run", "data", "-o", "by-2.h5"], cwd=folder)
    assert wrong.code == 2 and wrong.stderr.count("by-2.h5 exists") == 1
    return folder


@pytest.fixture
def folder(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    for path in made.glob("*predictions*"):
        path.unlink()
    return made


def expected(folder: Path) -> np.ndarray:
    """By hand: every shard in the order of the names, dropout off."""
    weights = load_file(folder / "run" / "model.safetensors")
    xs = []
    for path in sorted((folder / "data").glob("*.h5")):
        with h5py.File(path) as file:
            xs.append(torch.from_numpy(file["x"][:]))
    hidden = torch.tanh(torch.cat(xs) @ weights["0.weight"].T + weights["0.bias"])
    return (hidden @ weights["3.weight"].T + weights["3.bias"]).numpy()


def read(path: str = "predictions.h5") -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        return {name: dataset[:] for name, dataset in file.items()}


def predict(*words: str) -> int:
    return cli.main(["predict", "run", "data", "-o", "predictions.h5", *words])


def test_row_i_is_what_the_model_says_of_sample_i(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict() == 0
    assert capsys.readouterr().out == f"predictions.h5: {SAMPLES} samples: prediction (1,) float32\n"
    found = read()
    assert list(found) == ["prediction"]
    np.testing.assert_allclose(found["prediction"], expected(folder), rtol=0, atol=1e-6)
    assert sorted(path.name for path in folder.glob("*predictions*")) == ["predictions.h5"]


@pytest.mark.parametrize("size", [2, 3])
def test_the_number_of_ranks_changes_no_bit(folder: Path, size: int) -> None:
    assert predict("--batch-size", "6") == 0
    assert np.array_equal(read(f"by-{size}.h5")["prediction"], read()["prediction"])
    assert sorted(path.name for path in folder.glob(f"*by-{size}*")) == [f"by-{size}.h5"]


def test_the_file_is_a_source_for_others(folder: Path) -> None:
    assert predict() == 0
    catalogue = mt.Shards("predictions.h5").scan()
    assert catalogue.num_samples == SAMPLES and list(catalogue.arrays) == ["prediction"]


def test_a_jobs_own_function_says_what_is_predicted(folder: Path) -> None:
    more = "predict=lambda model, batch: {'twice': 2 * model(batch['x']).squeeze(1), 'as': batch['y'].bfloat16()},"
    (folder / "other.py").write_text(JOB.replace("{more}", "\n    " + more))
    assert predict("--job", "other.py", "--batch-size", "7") == 0
    found = read()
    np.testing.assert_allclose(found["twice"], 2 * expected(folder)[:, 0], rtol=0, atol=1e-6)
    assert found["as"].shape == (SAMPLES,) and found["as"].dtype == np.float32


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("lambda model, batch: model(batch['z'])", "Job: predict asks for 'z'"),
        ("lambda model, batch: 1.0", "Job: predict must be a tensor with a row for each sample"),
        (
            "lambda model, batch: model(batch['x']).mean()",
            "must have a row for each of the batch's 40 samples",
        ),
        ("lambda model, batch: {'a': batch['x'][:3]}", "Job: predict['a'] must have a row"),
        ("lambda model, batch: {}", "has returned no tensor"),
        ("lambda model: 1", "which <lambda>(model) does not allow"),
    ],
)
def test_what_is_no_prediction_is_refused_and_leaves_nothing(
    folder: Path, function: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "other.py").write_text(JOB.replace("{more}", f"\n    predict={function},"))
    assert predict("--job", "other.py") == 2
    assert message in capsys.readouterr().err and list(folder.glob("*predictions*")) == []


def test_an_existing_file_is_kept_unless_it_may_go(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "predictions.h5").write_text("mine")
    assert (
        predict() == 2
        and "predictions.h5 exists; give another name, or --overwrite" in capsys.readouterr().err
    )
    assert (folder / "predictions.h5").read_text() == "mine"
    assert predict("--overwrite") == 0 and len(read()["prediction"]) == SAMPLES


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "data", "-o", "p.h5", "--which", "best"], "the run in run has kept no best model"),
        (["run", "data", "-o", "p.h5", "--which", "bets"], "did you mean 'best'"),
        (["nowhere", "data", "-o", "p.h5"], "nowhere holds no run"),
        (["run", "nothing-*.h5", "-o", "p.h5"], "nothing-*.h5"),
        (["run", "data", "-o", "no/p.h5"], "-o no/p.h5: there is no directory"),
        (["run", "data", "-o", "data"], "-o data: this is a directory"),
    ],
)
def test_what_is_not_there_is_named(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["predict", *words]) == 2 and message in capsys.readouterr().err


def test_the_set_may_be_one_of_python(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_five = "import torch\ntest_set = [(torch.full((3,), float(i)), i) for i in range(5)]\n"
    (folder / "sets.py").write_text(f"{of_five}def made(): return test_set[:2]\n")
    for name, number in (("test_set", 5), ("made", 2)):
        assert cli.main(["predict", "run", f"sets.py:{name}", "-o", "predictions.h5", "--overwrite"]) == 0
        assert len(read()["prediction"]) == number
    rows = mt.predict("run", [(torch.full((3,), float(i)), i) for i in range(2)], "more-predictions.h5")
    assert rows.num_samples == 2
    assert np.array_equal(read()["prediction"], read("more-predictions.h5")["prediction"])
    for name, said in (("none", "sets.py has no 'none'"), ("torch", "got module")):
        assert cli.main(["predict", "run", f"sets.py:{name}", "-o", "p.h5"]) == 2
        assert said in capsys.readouterr().err


def test_data_of_several_arrays_without_x_need_a_function(folder: Path) -> None:
    source = mt.Synthetic(8, a=((3,), "float32"), b=((3,), "float32"))
    with pytest.raises(UsageError, match=r"the data hold a, b, .*model\(batch\['a'\]\)"):
        mt.predict("run", source, "predictions.h5")
    one = mt.predict("run", mt.Synthetic(8, a=((3,), "float32")), "predictions.h5")
    assert one.num_samples == 8 and len(read()["prediction"]) == 8


@pytest.mark.parametrize("num_samples", [1, 7, 40, 41])
@pytest.mark.parametrize("batch_size", [1, 5, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_the_shares_of_ranks_are_whole_batches_that_lie_behind_one_another(
    num_samples: int, batch_size: int, size: int
) -> None:
    shares = [share_of(num_samples, batch_size, rank, size) for rank in range(size)]
    assert shares[0][0] == 0 and shares[-1][1] == num_samples
    assert all(before[1] == after[0] for before, after in zip(shares, shares[1:]))
    assert all(first % batch_size == 0 or first == end for first, end in shares)
    counts = [-(-(end - first) // batch_size) for first, end in shares]
    assert max(counts) - min(counts) <= 1


def test_parts_of_ranks_become_one_file_in_their_order(tmp_path: Path) -> None:
    rows = np.arange(30, dtype=np.int64).reshape(10, 3)
    paths = [tmp_path / f"part-{i}" for i in range(3)]
    for path, (first, end) in zip(paths, [(0, 6), (6, 6), (6, 10)]):
        batches = ({"a": rows[i : i + 2], "b": rows[i : i + 2, 0]} for i in range(first, end, 2))
        assert write_rows(path, batches, end - first) == (
            ["a (3,) int64", "b () int64"] if end > first else []
        )
    join_rows(paths, tmp_path / "whole.h5", 10)
    found = read(str(tmp_path / "whole.h5"))
    assert np.array_equal(found["a"], rows) and np.array_equal(found["b"], rows[:, 0])
