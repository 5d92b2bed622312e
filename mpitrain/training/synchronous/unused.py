"""Parameters that the loss of a step leaves out, where torch's DDP is not there to refuse them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mpitrain.errors import UsageError
from mpitrain.job import Job
from mpitrain.model.gradient.sparse_gradients import left_out_error, sparse_layers
from mpitrain.strategies.features import UNUSED_IN_PARTS


def check_used(job: Job, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse what DDP would wait for in vain.

    Raises:
        UsageError: one of `parameters` has no gradient, and the job does not allow for that.
    """
    if all(parameter.grad is not None for parameter in parameters):
        return
    tables = [name for name, one in sparse_layers(module).items() if one.weight.grad is None]
    if tables:
        raise left_out_error(tables)
    if job.accumulate > 1:
        raise UsageError(UNUSED_IN_PARTS)
    if job.find_unused_parameters is False:
        raise UsageError(
            "the loss leaves out parameters in this step, and allreduce() needs the gradient of every parameter; "
            "say Job(find_unused_parameters=True)"
        )
