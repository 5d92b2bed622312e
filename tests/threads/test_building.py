"""What goes wrong where the optimizer or the scheduler is built: all ranks leave together, whatever the family."""

import pytest
import torch

import mpitrain as mt
from mpitrain.errors import AgreedError
from mpitrain.values import parse
from tests import toy


class Unlike(torch.optim.SGD):
    """Cannot be built over the slices of a server."""

    elementwise = True

    def __init__(self, parameters, rate):
        super().__init__(parameters, lr=rate)


def failing(optimizer):
    raise ZeroDivisionError("no scheduler")


@pytest.mark.parametrize("strategy", ["allreduce()", "async()", "localsgd(period=2)", "decentralized()"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scheduler": failing}, r"all ranks: ZeroDivisionError: no scheduler"),
        ({"scheduler": lambda optimizer: None}, r"all ranks: UsageError: Job: scheduler must return"),
        (
            {"scheduler": toy.BY_METRIC["plateau"]},
            r"all ranks: UsageError: .* goes by what validations measure",
        ),
    ],
)
def test_a_scheduler_that_cannot_be_built_is_told_by_all_ranks_together(strategy, changes, said, tmp_path):
    with pytest.raises(AgreedError, match=said):
        mt.train(
            toy.make_job(**changes), parse(strategy, "strategy"), threads=2, run_dir=str(tmp_path), quiet=True
        )


def test_so_is_an_optimizer_that_a_server_alone_cannot_build(tmp_path):
    job = toy.make_job(optimizer=lambda parameters: Unlike(parameters, 0.1))
    with pytest.raises(AgreedError, match=r"ranks? 0: TypeError: .*rate"):
        mt.train(job, mt.Sync(), threads=2, run_dir=str(tmp_path), quiet=True)
