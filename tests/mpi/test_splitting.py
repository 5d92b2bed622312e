"""Models split over real ranks train to what one process makes of the same batches, and are saved under their own
names. Sums in another order agree in float64 to 1e-12; where the order is the same, so are the bits."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from mpitrain.checkpoint.parts import FOLDER
from mpitrain.training.measure import same_model
from tests.mpi import splits
from tests.mpi.cases import PROGRAMS, launch_program
from tests.ranks import find_mpi, run_ranks

SIZE = {"CHARNN_HIDDEN": "16", "CHARNN_LAYERS": "3"}


@pytest.fixture(scope="module", autouse=True)
def small_characters():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SIZE.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("four"), 4)


def launch(directory, num_ranks, *names, mpi="openmpi"):
    splits.pack_some_topics(directory)
    argv = [str(find_mpi(mpi)[0]), str(PROGRAMS / "split_runs.py"), str(directory), *names]
    run = run_ranks(num_ranks, argv, env=SIZE, timeout_s=200, mpi=mpi)
    run.check()
    return directory


def result_of(path):
    return json.loads((path / "result.json").read_text())


def job_of(num_ranks, name, directory=None):
    job = splits.character_job(directory) if directory else splits.deep_job()
    return splits.changed(job, **splits.RUNS[num_ranks][name][1])


def assert_close(path, expected, validation_loss):
    trained = load_file(path / "model.safetensors")
    assert list(trained) == sorted(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-12, atol=1e-12)
    assert result_of(path)["validation_loss"] == pytest.approx(validation_loss, rel=1e-12)


@pytest.mark.host
def test_characters_split_by_layers_are_one_process_bit_for_bit(two):
    job = splits.character_job(two)
    state, validation_loss = splits.serial(job, num_pieces=4)
    for name in ("charnn-1f1b", "charnn-gpipe"):
        trained = load_file(two / name / "model.safetensors")
        assert list(trained) == sorted(state)
        assert all(torch.equal(trained[key], tensor) for key, tensor in state.items())
        assert result_of(two / name)["validation_loss"] == pytest.approx(validation_loss, rel=1e-12)


def test_characters_split_by_layers_train_to_the_loss_of_whole_batches(two):
    _, validation_loss = splits.serial(splits.character_job(two), num_pieces=1)
    assert result_of(two / "charnn-1f1b")["validation_loss"] == pytest.approx(validation_loss, rel=1e-12)


@pytest.mark.extended
def test_mpich_gives_the_same_bits(two, tmp_path):
    names = ("charnn-1f1b", "deep-tensor", "adam-sharded")
    launch(tmp_path, 2, *names, mpi="mpich")
    for name in (*names, "adam-sharded-resumed"):
        assert same_model(two / name / "model.safetensors", tmp_path / name / "model.safetensors")


def test_bubble_and_idle_time_are_reported(two):
    result = result_of(two / "charnn-1f1b")
    told = result["pipeline"]
    assert told["bubble"] == 1 / 5 and (told["stages"], told["microbatches"], told["schedule"]) == (
        2,
        4,
        "1f1b",
    )
    assert sum(told["parameters"]) == sum(p.numel() for p in splits.character_job(two).model().parameters())
    assert [row["stage"] for row in result["ranks"]] == [0, 1]
    for share, row in zip(told["idle_share"], result["ranks"]):
        assert row["idle_s"] > 0 and row["compute_s"] > 0 and share == row["idle_share"]
        assert row["idle_s"] + row["compute_s"] <= result["train_s"]


@pytest.mark.host
def test_statistics_and_random_numbers_see_each_microbatch_once(two):
    """Bit for bit with batch norm and dropout, in the stage that rank 1 holds: learning shapes has left no trace."""
    job = job_of(2, "normed")
    state, _ = splits.serial(job, num_pieces=2, rank=1)
    trained = load_file(two / "normed" / "model.safetensors")
    assert int(trained["1.num_batches_tracked"]) == 2 * 2 * 2
    assert all(torch.equal(trained[key], tensor) for key, tensor in state.items())


@pytest.mark.parametrize("name", ["deep-1f1b", "deep-tensor", "deep-sharded"])
def test_on_two_ranks(two, name):
    assert_close(two / name, *splits.serial(splits.deep_job(), 1))


@pytest.mark.skipif(not splits.HAS_MUON, reason="this torch has no Muon")
def test_muon_orthogonalises_whole_matrices(two):
    """It rounds to 8 bits on the way: over slices, sums in another order differ by 1e-3 and more."""
    job = splits.changed(job_of(2, "muon-sharded"), batch_size=splits.BATCH)
    state, _ = splits.serial(job, 1)
    trained = load_file(two / "muon-sharded" / "model.safetensors")
    for name, tensor in state.items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", splits.RUNS[4])
def test_on_four_ranks_replicas_are_averaged(four, name):
    whole = splits.changed(job_of(4, name), batch_size=splits.BATCH)
    assert_close(four / name, *splits.serial(whole, 1))
    result = result_of(four / name)
    assert (result["steps"], result["samples"], result["samples_left_out"]) == (2 * 3, 2 * 31, 0)
    assert (result["workers"], result["servers"], result["nodes"]) == (4, 0, 2)


def test_places_follow_the_nodes(four):
    def places(name):
        return [(row["replica"], row["part"]) for row in result_of(four / name)["ranks"]]

    assert places("deep-pipeline") == [(0, 0), (0, 1), (1, 0), (1, 1)]  # stage 0 on the node of ranks 0 and 2
    assert places("deep-tensor") == [(0, 0), (1, 0), (0, 1), (1, 1)]  # each model on one node
    assert places("deep-replicas") == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_each_rank_holds_its_part_only(two, four):
    whole = sum(parameter.numel() for parameter in splits.Deep().parameters())
    for path in (two / "deep-1f1b", two / "deep-sharded"):
        held = [row["parameters"] for row in result_of(path)["ranks"]]
        assert sum(held) == whole and max(held) < whole
    assert [row["parameters"] for row in result_of(four / "deep-sharded")["ranks"]] != [whole] * 4


def test_the_saved_model_loads_into_the_plain_module(two):
    for name in ("deep-1f1b", "deep-tensor", "deep-sharded"):
        splits.Deep().load_state_dict(load_file(two / name / "model.safetensors"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nan-pipeline", "rank 1 (stage 1 of pipeline 0, step 1): loss is nan"),
        ("nan-sharded", "rank 1 (worker, step 1): loss is nan"),
    ],
)
def test_a_nan_loss_stops_and_names_rank_and_step(two, name, said):
    result = result_of(two / name)
    assert (result["status"], result["exit_code"], result["failure"], result["steps"]) == ("fail", 1, said, 2)
    saved = load_file(two / name / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())


@pytest.mark.parametrize(
    ("num_ranks", "name"), [(n, name) for n, names in splits.RESUMED.items() for name in names]
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(two, four, num_ranks, name):
    """Adam's moments in pieces included; of two replicas the first one's are written, and both go on from them."""
    path = {2: two, 4: four}[num_ranks]
    whole, resumed = result_of(path / name), result_of(path / f"{name}-resumed")
    assert resumed["resumed_from"] == 2 * splits.BATCH and resumed["status"] == "ok"
    assert (resumed["samples"], resumed["steps"]) == (whole["samples"], whole["steps"]) == (2 * 31, 6)
    assert same_model(path / name / "model.safetensors", path / f"{name}-resumed" / "model.safetensors")
    folder = path / f"{name}-resumed" / FOLDER / f"{2 * splits.BATCH:012d}"
    written = (
        4 if (num_ranks, name) == (4, "deep-tensor") else 2
    )  # FSDP2 cuts the slices of tensor() once more
    assert len(list(folder.glob("*.json"))) == written


def test_a_signal_to_one_rank_ends_the_run_which_then_goes_on(two):
    told = json.loads((two / "signal-pipeline.json").read_text())
    assert (told["status"], told["exit_code"], told["steps"]) == ("requeue", 75, 1)
    assert result_of(two / "signal-pipeline")["resumed_from"] == splits.BATCH
    assert_close(two / "signal-pipeline", *splits.serial(splits.deep_job(), 1))


def test_fewer_replicas_go_on_from_there_and_other_parts_do_not(four, tmp_path):
    # at the end of an epoch: in the middle of one, batches of another size are refused
    for folder in sorted((four / "deep-pipeline" / FOLDER).glob("0*"))[3:]:
        shutil.rmtree(folder)
    told = launch_program(2, "split_again", str(tmp_path), str(four / "deep-pipeline"))
    told.check()
    assert (tmp_path / "fewer" / "model.safetensors").exists(), str(told)
    assert_close(tmp_path / "fewer", *splits.serial(splits.deep_job(), 1))
    assert result_of(tmp_path / "fewer")["resumed_from"] == splits.deep_job().data.num_samples
    for kind in ("sharded in 2 parts", "allreduce"):
        assert f"({kind}) cannot go on from it" in str(told), told


def test_a_nan_loss_can_be_skipped_and_is_counted(two):
    result = result_of(two / "skip-pipeline")
    assert (result["status"], result["nonfinite"], result["accepted"]) == ("ok", 1, 5)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("three-stages", "2 rank(s) cannot be divided into models of 3"),
        ("uneven-batch", "a batch of 12 samples cannot be cut into 5"),
        ("no-stages", "cannot name the layers of Deep"),
        ("no-plan", "tensor() needs the job to say which layers are sliced"),
        ("wrong-plan", "'layers.*' matches none of first, last, body"),
        ("odd-plan", "first has 5 numbers to slice as 'row', no multiple of 2"),
        ("norm-plan", "norm is LayerNorm; only Linear and Embedding can be sliced"),
    ],
)
def test_what_cannot_be_split_is_said_once_and_all_leave(two, name, said):
    assert said in (two / f"{name}.refused").read_text()


def test_nothing_in_the_tests_was_refused_unasked(two, four):
    assert len(list(two.glob("*.refused"))) == 7 and not list(four.glob("*.refused"))
