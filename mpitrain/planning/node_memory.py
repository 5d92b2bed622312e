"""What the ranks of a node need together, and what a batch script has to ask for.

Invariants: sizes are those that the dry run tells of each rank; nothing is measured but this process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from mpitrain.job import Job
from mpitrain.model.building.deferred import Deferred
from mpitrain.planning.model_parallel import split_needs
from mpitrain.strategies.model_parallel.base import Split
from mpitrain.strategies.placement import Roles
from mpitrain.training.measure import build_module, build_optimizer
from mpitrain.training.memory import Need, dense_messages, libraries_bytes, memory_needs, sizes_of

MARGIN = 0.2  # for what the backward pass keeps of a batch, for data, and for what is told too low


def needs_of(
    job: Job,
    roles: Roles,
    nodes: tuple[int, ...],
    module: nn.Module,
    optimizer: Optimizer,
    may_step: bool = True,
) -> list[Need]:
    """Of each kind of rank; empty where they are not known. `may_step`: as for `sizes_of`."""
    strategy = job.run_strategy
    if isinstance(strategy, Split):
        return split_needs(strategy, job, nodes, module, optimizer)
    sizes = sizes_of(module, optimizer, strategy, may_step)
    if strategy.reduces or (sizes.optimizer is None and not may_step):
        return []
    return memory_needs(strategy, sizes, dense_messages(strategy, module, roles))


def most_on_a_node(
    needs: Sequence[Need], roles: Roles, nodes: tuple[int, ...], before_bytes: float
) -> tuple[float, int]:
    """(bytes, ranks) of the node whose ranks need most; `before_bytes`: of a process before it has a model."""
    each = {need.role: before_bytes + need.num_bytes for need in needs}
    held = [each.get(roles.of(rank), each["worker"]) for rank in range(len(nodes))]
    on = {home: [one for one, node in zip(held, nodes, strict=True) if node == home] for home in nodes}
    most = max(on.values(), key=sum)
    return sum(most), len(most)


def node_bytes_of(
    job: Job, lr: float | None, nodes: tuple[int, ...], roles: Roles
) -> tuple[float, int] | None:
    """(bytes, ranks) as above, of a job that is not built here: its large tensors are not made. None: not known, or
    its functions need what is not here."""
    before_bytes = libraries_bytes()
    try:
        module = build_module(job, torch.device("cpu"), Deferred())
        needs = needs_of(job, roles, nodes, module, build_optimizer(job, module, lr), may_step=False)
    except Exception:  # the run tells why, if it is more than that
        return None
    return most_on_a_node(needs, roles, nodes, before_bytes) if needs else None


def proposed(num_bytes: float) -> str:
    """The option of sbatch for so many bytes and the margin, in whole GiB."""
    return f"--mem={math.ceil(num_bytes * (1 + MARGIN) / 2**30)}G"
