"""Families of metrics: which names go together, and a line of many metrics within a terminal."""

import pytest

from mpitrain.reporting.families import families, line_of

NAMES = {
    "per class": (
        ["accuracy", *(f"{kind}/class_{one}" for kind in ("recall", "f1") for one in range(5)), "validation_loss"],
        ["accuracy", "recall/class_*", "f1/class_*", "validation_loss"],
    ),
    "words at the end": (["iou_cat", "iou_dog", "iou_cow", "iou_man", "miou"], ["iou_*", "miou"]),
    "words in front": (["cat.ap", "dog.ap", "cow.ap", "man.ap"], ["*.ap"]),
    "in brackets": ([f"ap[{one}]" for one in ("a", "b", "c", "d")], ["ap[*]"]),
    "numbers within": ([f"top{one}_error" for one in (1, 2, 3, 5, 10)], ["top*_error"]),
    "too few": (["top1", "top5", "f1_a", "f1_b"], ["top1", "top5", "f1_a", "f1_b"]),
    "no words": (["*", "/", "", "a"], ["*", "/", "", "a"]),
}  # fmt: skip


@pytest.mark.parametrize(("names", "patterns"), NAMES.values(), ids=NAMES)
def test_names_that_differ_in_one_word_are_a_family(names, patterns):
    found = families(names)
    assert [one.pattern for one in found] == patterns
    assert sorted(name for one in found for name in one.names) == sorted(names)


def test_a_name_that_matters_stays_alone():
    found = families([f"recall_{one}" for one in range(5)], alone=["recall_3"])
    assert [(one.pattern, len(one.names)) for one in found] == [("recall_*", 4), ("recall_3", 1)]


def test_a_line_of_many_metrics_fits_and_keeps_what_is_no_metric():
    row = {"epoch": 3, "samples": 4314, "validation_loss": 0.25, "accuracy": 0.9}
    row |= {f"{kind}/class_{one}": one / 100 for kind in ("recall", "precision", "f1") for one in range(20)}
    row["model"] = "/runs/mine/model.safetensors"
    whole = line_of("validation", row, None)
    assert whole == line_of("validation", row, len(whole)) and whole.count("class_") == 60
    assert line_of("validation", row, 160) == (
        "validation epoch 3 samples 4314 validation_loss 0.25 accuracy 0.9 recall/class_* 0 to 0.19 (20) "
        "+40 metrics model /runs/mine/model.safetensors"
    )
    for width in range(80, 200):
        line = line_of("validation", row, width)
        assert line.startswith("validation epoch 3 samples 4314 ") and line.endswith("model.safetensors")
        assert len(line) <= max(width, len("validation epoch 3 samples 4314 +62 metrics model ") + 28)
        num_shown = sum(name in line for name in ("validation_loss", "accuracy")) + 20 * line.count("(20)")
        assert (f"+{62 - num_shown} metrics" in line) == (num_shown < 62)


def test_a_long_text_is_no_metric_and_is_told_whole():
    text = "word " * 40
    assert line_of("warning", {"text": text, "loss": "nan"}, 80).startswith(f"warning text {text}")
