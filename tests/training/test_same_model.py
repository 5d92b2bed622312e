"""Two saved models are the same if all their bits are."""

import pytest
import torch
from safetensors.torch import save_file

from mpitrain.training.measure import same_model

NAN = torch.tensor([1.0, float("nan")])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (NAN, NAN.clone(), True),
        (NAN, torch.tensor([2.0, float("nan")]), False),
        (torch.tensor(0.0), torch.tensor(-0.0), False),
        (torch.tensor([True, False]), torch.tensor([True, False]), True),
        (torch.zeros(2), torch.zeros(1, 2), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), False),
        (torch.zeros(0), torch.zeros(0), True),
    ],
)
def test_models_are_compared_bit_by_bit(one, other, same, tmp_path):
    for name, tensor in (("one", one), ("other", other)):
        save_file({"weight": tensor}, tmp_path / name)
    assert same_model(tmp_path / "one", tmp_path / "other") is same
