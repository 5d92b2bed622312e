"""Who this process is among those that train under a strategy, before there is a model to wrap: frameworks ask that
first, and want a process group.

Invariants: workers are torch's ranks 0 to `num_workers - 1` and form its default group; servers are numbered after them
and belong to no group, so that whatever a framework gathers or waits for, it does among workers.
"""

from __future__ import annotations

import dataclasses
import functools
import os

import torch.distributed as dist

from mpitrain.errors import UsageError
from mpitrain.mpi.process_group.process_group import MpiProcessGroup, init_default_group
from mpitrain.mpi.runtime import Runtime, start
from mpitrain.strategies.allreduce import AllReduce
from mpitrain.strategies.base import Strategy
from mpitrain.strategies.placement import Roles
from mpitrain.training.session import assign_roles, attempt
from mpitrain.values import parse

_membership: Membership | None = None


@dataclasses.dataclass(frozen=True)
class Membership:
    """This process's place.

    Args:
        strategy: under which the program trains; roles: everybody's.
        rank: of MPI; nodes: the node of every rank of MPI.
    """

    strategy: Strategy
    roles: Roles
    rank: int
    nodes: tuple[int, ...]

    @functools.cached_property
    def serves(self) -> bool:
        """Whether this process is a server, which is in no group."""
        return self.rank in self.roles.servers

    @property
    def num_workers(self) -> int:
        """The size of torch's group."""
        return len(self.roles.workers)

    @functools.cached_property
    def index(self) -> int:
        """This worker's rank in torch's group; servers are counted on after the workers."""
        return (*self.roles.workers, *self.roles.servers).index(self.rank)

    @property
    def node(self) -> int:
        """The node of this process."""
        return self.nodes[self.rank]

    @functools.cached_property
    def local_index(self) -> int:
        """As `index`, among those of this node."""
        return self._of_node(self.roles.workers, self.roles.servers).index(self.rank)

    @functools.cached_property
    def num_local_workers(self) -> int:
        """Workers of this node."""
        return len(self._of_node(self.roles.workers))

    def _of_node(self, *ranks: tuple[int, ...]) -> list[int]:
        return [rank for some in ranks for rank in some if self.nodes[rank] == self.node]


def join(strategy: Strategy | str | None = None) -> Membership:
    """Learn who this process is, and make torch's default group of the workers. Collective over all ranks that MPI has
    started; later calls make no other group. On workers torchrun's variables are then torch's ranks.

    Raises:
        UsageError (AgreedError under MPI): an unknown strategy, one that no loop of one's own can have, too few ranks,
            or other workers than those of the group that there is.
    """
    global _membership
    runtime = start()

    def check() -> Membership:
        asked = parse(strategy, "strategy") if isinstance(strategy, str) else strategy or AllReduce()
        assert isinstance(asked, Strategy)
        roles = assign_roles(runtime, asked, own_loop=True)
        found = Membership(asked, roles, runtime.rank, tuple(runtime.nodes))
        before = () if _membership is None else _membership.roles.workers
        _check_group()
        if before not in ((), roles.workers) or (not before and dist.is_initialized() and roles.servers):
            raise UsageError(
                f"{asked}: its workers are ranks {list(roles.workers)}, and torch's group is of others already: give "
                "this strategy before anything makes a group"
            )
        return found

    found = attempt(runtime, check)
    runtime.compare({"strategy": str(found.strategy)})
    _membership = found
    if not dist.is_initialized():  # or no more: some frameworks end it with a training
        init_default_group(runtime, found.roles.workers)
    _export(found)
    return found


def joined() -> Membership | None:
    """What `join` has found last, in this process."""
    return _membership


def make_group(runtime: Runtime) -> None:
    """The default group of all ranks, unless the program has made it.

    Raises:
        UsageError: it has made another one.
    """
    _check_group()
    if not dist.is_initialized():
        init_default_group(runtime)


def _check_group() -> None:
    if dist.is_initialized() and not isinstance(dist.group.WORLD, MpiProcessGroup):
        raise UsageError(
            f"torch.distributed has a group already, over {dist.get_backend()}: leave making it to mpitrain, or make "
            'it over "mpi4py"'
        )


def _export(found: Membership) -> None:
    """torchrun's variables, which frameworks look at; of a server, too, for it must not take itself for rank 0."""
    os.environ |= {
        "RANK": str(found.index), "WORLD_SIZE": str(found.num_workers), "LOCAL_RANK": str(found.local_index),
        "LOCAL_WORLD_SIZE": str(found.num_local_workers),
    }  # fmt: skip
