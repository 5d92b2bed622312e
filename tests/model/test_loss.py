"""What a job's loss returns: a mean, or a sum and what to divide it by."""

import math

import pytest
import torch

from mpitrain.errors import UsageError
from mpitrain.model.gradient.loss import Tally, read_loss


def test_a_mean_and_a_sum_with_its_weight():
    assert read_loss(torch.tensor(3.0)).mean == 3.0 and read_loss(torch.tensor(3.0)).weight is None
    assert read_loss((torch.tensor(6.0), torch.tensor(4))).mean == 1.5
    assert read_loss((torch.tensor(0.0), 0)).mean == 0.0, "nothing counts: no gradient, and not NaN"


@pytest.mark.parametrize(
    "returned", [(torch.tensor(1.0),), (torch.tensor(1.0), 2, 3), (torch.tensor(1.0), -1)]
)
def test_what_is_neither_is_refused_with_the_way_out(returned):
    with pytest.raises(UsageError, match=r"\(sum, weight\)"):
        read_loss(returned)


def test_a_tally_divides_losses_by_their_weight_and_means_by_samples():
    tally, other = Tally(), Tally()
    tally.add("loss", (torch.tensor(6.0), 2.0), 10)
    other.add("loss", (torch.tensor(4.0), 3.0), 10)
    for one, mean, count in ((tally, 0.5, 10), (other, 1.0, 30)):
        one.add("accuracy", mean, count)
    tally.merge(other.sums)
    assert tally.means() == {"loss": 2.0, "accuracy": 35 / 40}
    tally = Tally()
    tally.add("loss", (torch.tensor(0.0), 0.0), 10)
    assert math.isnan(tally.means()["loss"])
