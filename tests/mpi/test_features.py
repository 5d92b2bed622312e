"""The cells of the table in `docs/features.py`, and clipping over ranks against torch's in one process.

Strategies with a virtual world run there; the others on two ranks, in one launch, unless they need four.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

import mpitrain as mt
from docs.features import FEATURES
from mpitrain.checkpoint.parts import newest, read_part
from mpitrain.errors import UsageError
from mpitrain.strategies.allreduce import AllReduce
from mpitrain.strategies.model_parallel.base import Split
from mpitrain.strategies.sampling.dealer import share_out
from mpitrain.system.files.run_directory import folder_of
from mpitrain.training.measure import same_model
from mpitrain.values import names, parse
from tests import toy
from tests.mpi import splits
from tests.mpi.cases import launch_program
from tests.sampling import ALL_CELLS, cells


def is_virtual(text):
    return not isinstance(parse(text, "strategy"), AllReduce | Split)


CELLS = cells(
    ((feature, row, text) for feature in FEATURES for row in feature.rows for text in row.strategies),
    lambda cell: (cell[0].name, cell[1], is_virtual(cell[2])),
)
CLIPPED = {
    "norm": {"clip_norm": 0.3},
    "value": {"clip_value": 0.02},
    "both": {"clip_norm": 0.3, "clip_value": 0.02},
    "one cycle": {"scheduler": "one cycle"},
    "warm up": {"scheduler": "warm up"},
    "plateau": {"scheduler": "plateau"},
    "ema": {"ema": 0.7},
    "huge": {"clip_norm": 1e30, "clip_value": 1e30},
    "not": {},
}
NOISED = {"clip_norm": 0.3, "gradient_noise": 0.05}
LIKE_ONE_PROCESS = ("norm", "value", "both", "one cycle", "warm up", "plateau")
ACCUMULATED = {
    "thrice": {"accumulate": 3},
    "thrice, weighted": {"accumulate": 3, "loss": "weighted"},
    "thrice, clipped": {"accumulate": 3, **CLIPPED["both"]},
}
_NORMED = {"model": "normed in float64", "sync_batchnorm": True}
NORMED = {
    "normed": _NORMED,
    "normed, recomputed": _NORMED | {"activation_checkpointing": True},
    "normed, thrice": _NORMED | {"accumulate": 3},
}
if ALL_CELLS:  # the compiler alone takes seconds of every rank
    NORMED["normed, compiled"] = _NORMED | {"compile": "eager"}
IN_BFLOAT16 = {"model": "normed", "sync_batchnorm": True, "precision": "bfloat16"}
SERVED = {"sync(servers=2)": ("norm", "both"), "backup(spare=0,servers=3)": ("norm",)}
NORMED_ON = ("allreduce()", "sharded()")
# all, or of a model that is sharded one
NORMED_RUNS = [
    (text, how)
    for text in NORMED_ON
    for how in NORMED
    if ALL_CELLS or text == NORMED_ON[0] or how == "normed"
]
# the last one needs four ranks
WHOLE = ("allreduce()", "sharded()", "pipeline(microbatches=3)", "tensor()", "sharded(replicas=2)")

IN_BATCHES = ("allreduce()", "sharded()", "tensor()", "sharded(replicas=2)")
ON_FOUR = WHOLE if ALL_CELLS else (WHOLE[0], WHOLE[-1])
UNLIMITED = ON_FOUR if ALL_CELLS else ON_FOUR[:1]
IN_BATCHES_ON_FOUR = IN_BATCHES if ALL_CELLS else IN_BATCHES[-1:]
ACCUMULATED_ON_FOUR = tuple(ACCUMULATED) if ALL_CELLS else ("thrice, clipped",)


def cell_name(feature, text):
    return f"cell {feature} {text}"


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    runs = {f"{text} {how}": (text, NORMED[how]) for text, how in NORMED_RUNS}
    runs |= {f"{text} {how}": (text, CLIPPED[how]) for text, limits in SERVED.items() for how in limits}
    runs["cell normed in bfloat16"] = (NORMED_ON[0], IN_BFLOAT16)
    for text in ON_FOUR:
        runs |= clipped(
            (text,), (*clipped_on_four(text), "ema", *(("huge", "not") if text in UNLIMITED else ()))
        )
    runs |= accumulated(IN_BATCHES_ON_FOUR, ACCUMULATED_ON_FOUR)
    runs["tensor() noised"] = ("tensor()", NOISED)
    return launch(tmp_path_factory.mktemp("four"), 4, runs)


ALIKE = ("shards", "dataset", "loader")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    path = tmp_path_factory.mktemp("two")
    x, y = toy.dataset().tensors
    with mt.ShardWriter(path / "same") as writer:
        writer.add({"x": x.numpy(), "y": y.numpy()})
    real = [(feature, text) for feature, row, text in CELLS if not is_virtual(text) and not row.said]
    runs = {cell_name(feature.name, text): (text, feature.fields) for feature, text in real}
    runs |= {cell_name("none", text): (text, {}) for _, text in real}
    runs |= {f"allreduce() {data}": ("allreduce()", {"data": data}) for data in ALIKE}
    runs |= {f"{text} {how}": (text, CLIPPED[how]) for text in WHOLE[:-1] for how in clipped_on_two(text)}
    runs["sharded() noised"] = ("sharded()", NOISED)
    return launch(path, 2, runs | accumulated(IN_BATCHES[:-1]))


def clipped_on_two(text):
    """All, or of those that split a model one that limits and one that goes by a schedule."""
    return LIKE_ONE_PROCESS if ALL_CELLS or text == WHOLE[0] else ("both", "one cycle", "plateau")


def clipped_on_four(text):
    """All, or one where two ranks have all, and of a split model what two ranks have of each."""
    return clipped_on_two(text) if text not in WHOLE[:-1] else LIKE_ONE_PROCESS if ALL_CELLS else ("both",)


def clipped(strategies, hows):
    return {f"{text} {how}": (text, CLIPPED[how]) for text in strategies for how in hows}


def accumulated(strategies, hows=tuple(ACCUMULATED)):
    return {f"{text} {how}": (text, ACCUMULATED[how]) for text in strategies for how in hows}


def launch(path, num_ranks, runs):
    launch_program(num_ranks, "feature_runs", str(path), json.dumps(runs), cwd=path, timeout_s=600).check()
    return path


def test_the_table_names_every_strategy_for_every_feature():
    for feature in FEATURES:
        named = {parse(text, "strategy").name for row in feature.rows for text in row.strategies}
        # `hybrid` trains no model without tables, with which a feature could be compared: tests/virtual/test_hybrid.py
        assert named == set(names("strategy")) - {"hybrid"}, feature.name


@pytest.mark.parametrize(
    ("feature", "row", "text"), CELLS, ids=[f"{feature.name} {text}" for feature, _, text in CELLS]
)
def test_what_the_table_says_of_a_feature_under_a_strategy_is_so(feature, row, text, tmp_path, request):
    if row.said:
        with pytest.raises(UsageError, match=row.said):
            mt.simulate(
                toy.make_job(validate=toy.Memory(), **toy.scheduled(feature.fields)),
                parse(text, "strategy"),
                run_dir=str(tmp_path / "refused"),
            )
        return
    if is_virtual(text):
        options = {"workers": 3, "quiet": True}
        for name, fields in (("with", feature.fields), ("none", {})):
            job = toy.make_job(validate=toy.Memory(), **toy.scheduled(fields))
            mt.simulate(job, parse(text, "strategy"), run_dir=str(tmp_path / name), **options)
        runs = (tmp_path / "with", tmp_path / "none")
    else:
        path = request.getfixturevalue("two")
        runs = (path / cell_name(feature.name, text), path / cell_name("none", text))
    results = [json.loads((run / "result.json").read_text()) for run in runs]
    assert all(result["status"] == "ok" for result in results)
    assert not feature.says or [result[feature.says] for result in results] == [True, False]
    assert not feature.leaves or (runs[0] / feature.leaves).is_file()
    measured = [feature.measures in result["metrics"] for result in results]
    assert not feature.measures or measured == [True, False]
    assert not feature.keeps_model or same_model(*(run / "model.safetensors" for run in runs))
    assert not feature.changes_model or not same_model(*(run / "model.safetensors" for run in runs))


@pytest.mark.parametrize(
    ("num_ranks", "text", "how"),
    [
        *(("two", text, how) for text in WHOLE[:-1] for how in clipped_on_two(text)),
        *(("four", text, how) for text in ON_FOUR for how in clipped_on_four(text)),
        *(("four", text, how) for text, limits in SERVED.items() for how in limits),
    ],
)
def test_all_ranks_together_clip_and_schedule_as_one_process_with_the_whole_batch(
    num_ranks, text, how, request
):
    """In float64, the last batch of an epoch an incomplete one; how long the gradients are matters everywhere."""
    path = request.getfixturevalue(num_ranks)
    expected, _ = splits.serial(splits.changed(splits.deep_job(), **toy.scheduled(CLIPPED[how])), 1)
    found = load_file(path / f"{text} {how}" / "model.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("num_ranks", "text", "how"),
    [
        *(("two", text, how) for text in IN_BATCHES[:-1] for how in ACCUMULATED),
        *(("four", text, how) for text in IN_BATCHES_ON_FOUR for how in ACCUMULATED_ON_FOUR),
    ],
)
def test_ranks_that_take_a_step_in_batches_are_one_process_with_the_whole_batch(
    num_ranks, text, how, request
):
    """In float64; the last step of an epoch has fewer batches."""
    path = request.getfixturevalue(num_ranks)
    fields = {key: value for key, value in ACCUMULATED[how].items() if key not in ("accumulate", "loss")}
    fields |= {"loss": splits.weighted_loss} if "loss" in ACCUMULATED[how] else {}
    expected, _ = splits.serial(splits.changed(splits.deep_job(), **fields), 1)
    found = load_file(path / f"{text} {how}" / "model.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


def test_slices_of_a_model_draw_noise_apart_after_the_norm_of_the_whole_was_clipped(two):
    job = splits.changed(splits.deep_job(), clip_norm=NOISED["clip_norm"])
    keys = toy.keys_of_steps(job.data.num_samples, job.epochs, splits.BATCH)
    noised = toy.noised_by_hand(job.optimizer, NOISED["gradient_noise"], keys, num_parts=2)
    expected, _ = splits.serial(splits.changed(job, optimizer=noised), 1)
    found = load_file(two / "sharded() noised" / "model.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


def test_ranks_that_hold_the_same_slice_draw_the_same_noise(four):
    """Of two replicas of two slices, FSDP shards each: what is not sliced lies on both ranks of a replica."""
    found = newest(four / "tensor() noised")
    folder = folder_of(four / "tensor() noised", found.checkpoint_at)
    held = [read_part(folder, part)["own"]["module"] for part in found.parts]
    whole = [name for name in held[0] if not name.startswith(("body", "last.weight"))]
    assert "norm.weight" in whole
    for name in whole:
        for first in (0, 2):
            assert torch.equal(held[first][name], held[first + 1][name]), name


@pytest.mark.parametrize("text", ON_FOUR[1:])
def test_parts_of_a_model_have_the_moving_average_of_the_whole(four, text):
    """In virtual time that of `allreduce` is compared with torch's."""
    found, expected = (load_file(four / f"{one} ema" / "model-ema.safetensors") for one in (text, WHOLE[0]))
    last = load_file(four / f"{text} ema" / "model.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)
        assert not torch.equal(last[name], tensor)


@pytest.mark.parametrize("data", ALIKE[1:])
def test_ranks_train_on_a_dataset_to_the_bits_of_shards(two, data):
    """Under the other families in virtual time."""
    assert same_model(*(two / f"allreduce() {one}" / "model.safetensors" for one in ("shards", data)))


@pytest.mark.parametrize("text", UNLIMITED)
def test_limits_that_nothing_exceeds_change_no_bit(four, text):
    assert same_model(*(four / f"{text} {how}" / "model.safetensors" for how in ("huge", "not")))


def serial_in_batches(job, num_ranks, accumulate):
    """One process whose batches are those of all ranks, `accumulate` of each rank a step."""
    torch.manual_seed(job.seed)
    module, steps = job.model(), []
    optimizer = job.optimizer(module.parameters())
    data = job.data.reader(None, 0).batch(0, 0, job.data.num_samples)
    for start in range(0, job.data.num_samples, splits.BATCH):
        size = min(splits.BATCH, job.data.num_samples - start)
        shares = [share_out(start, size, num_ranks, rank) for rank in range(num_ranks)]
        parts = -(-max(share for _, share in shares) // (splits.BATCH // num_ranks // accumulate))
        # one with fewer samples than batches begins with none
        taken = [
            [share_out(first, share, min(parts, share), part) for part in range(min(parts, share))]
            for first, share in shares
        ]
        taken = [[(0, 0)] * (parts - len(ranges)) + ranges for ranges in taken]
        steps.append(
            [
                [i for ranges in taken for i in range(ranges[part][0], sum(ranges[part]))]
                for part in range(parts)
            ]
        )
    for step in steps * job.epochs:
        optimizer.zero_grad()
        for part in step:
            loss = job.loss(module, {name: tensor[part] for name, tensor in data.items()})
            (loss * (len(part) / sum(map(len, step)))).backward()
        optimizer.step()
    return module.state_dict()


@pytest.mark.parametrize(("text", "how"), NORMED_RUNS)
def test_batch_statistics_of_all_ranks_are_those_of_one_process_with_the_whole_batch(four, text, how):
    """Running statistics included; of the last step of an epoch ranks have two samples or one."""
    job = splits.changed(splits.deep_job(), model=toy.NORMED["normed in float64"])
    accumulate = NORMED[how].get("accumulate", 1)
    expected = serial_in_batches(job, 4, accumulate)
    found = load_file(four / f"{text} {how}" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-10)
    if accumulate == 1:
        whole, validation_loss = splits.serial(job, 1)
        torch.testing.assert_close(expected, whole, rtol=1e-12, atol=1e-12)
        result = json.loads((four / f"{text} {how}" / "result.json").read_text())
        assert result["validation_loss"] == pytest.approx(validation_loss, rel=1e-9)


def test_batch_statistics_of_all_ranks_are_added_up_in_32_bits(four):
    """Where the layer's inputs are of 16."""
    job = splits.changed(splits.deep_job(), model=toy.normed, loss=toy.square_loss)
    found = load_file(four / "cell normed in bfloat16" / "model.safetensors")
    expected, _ = splits.serial(job, 1)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=0.05, atol=0.05)
