"""A model split inside its layers: each of K ranks holds a vertical slice of the layers the job's plan names.

    column: y_k = x W_k, W = [W_1 ... W_K]        row: y = sum over k of x_k W_k, W = [W_1; ...; W_K]

A column layer followed by an elementwise function and a row layer needs one allreduce forward and one backward
(Shoeybi et al., "Megatron-LM", 2019, section 3). The slices of a layer talk in every layer, so they sit on one
node.
"""

from __future__ import annotations

from mpitrain.strategies.model_parallel.base import Split
from mpitrain.values import register


@register("strategy", "tensor")
class TensorParallel(Split):
    """Each model is held by `parallel` ranks, its layers sliced as the job's `tensor_plan` says.

    Gradients are averaged over the models, which also share out parameters and optimizer state among them (FSDP2).

    Shoeybi et al., "Megatron-LM", 2019.

    Args:
        parallel: ranks that hold one model.
    """

    parallel: int = 2

    def check(self) -> None:
        self.hold("parallel", self.parallel >= 1, "must be at least 1")

    def num_parts(self, num_ranks: int) -> int:
        return self.parallel
