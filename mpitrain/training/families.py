"""How each family of strategies trains: the function of a rank that is a process, and of one that is a thread.

Invariants: a family's modules are imported when it runs, so that each takes only what it needs of torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from mpitrain.strategies.allreduce import AllReduce
from mpitrain.strategies.base import ServerStrategy, Strategy
from mpitrain.strategies.decentralized import Decentralized
from mpitrain.strategies.local_sgd import LocalSGD
from mpitrain.strategies.model_parallel.pipeline import Pipeline
from mpitrain.strategies.model_parallel.sharded import Sharded
from mpitrain.strategies.model_parallel.tensor import TensorParallel

if TYPE_CHECKING:
    from mpitrain.training.outcome import RunOutcome
    from mpitrain.training.session import Session


class Family(NamedTuple):
    """Modules below `mpitrain/training/` that run it. `threads`: empty where `strategies/features.py` refuses them."""

    function: str
    processes: str
    threads: str = ""

    def runner(self, in_threads: bool) -> Callable[[Session], RunOutcome]:
        """The function that runs this family on one rank."""
        module = importlib.import_module(
            f"mpitrain.training.{self.threads if in_threads else self.processes}"
        )
        found: Callable[[Session], RunOutcome] = getattr(module, self.function)
        return found


FAMILIES: dict[type[Strategy], Family] = {
    AllReduce: Family("run_allreduce", "synchronous.launch", "in_threads.allreduce"),
    LocalSGD: Family("run_local_sgd", "local_sgd.trainer", "in_threads.local_sgd"),
    Decentralized: Family("run_peers", "decentralized.run", "decentralized.run"),
    ServerStrategy: Family("run_servers", "parameter_server.run", "parameter_server.run"),
    Pipeline: Family("run_pipeline", "model_parallel.pipeline"),
    TensorParallel: Family("run_tensor", "model_parallel.tensor"),
    Sharded: Family("run_sharded", "model_parallel.sharded"),
}
