"""How each family of strategies runs: the function of a rank that is a process, of one that is a thread, and of a run
in virtual time.

Invariants: functions are named by text and imported when a family runs, so that each takes only what it needs of torch,
and simulations, a floor above, are no more than named here.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from mpitrain.strategies.allreduce import AllReduce
from mpitrain.strategies.base import ServerStrategy, Strategy
from mpitrain.strategies.decentralized import Decentralized
from mpitrain.strategies.local_sgd import LocalSGD
from mpitrain.strategies.model_parallel.pipeline import Pipeline
from mpitrain.strategies.model_parallel.sharded import Sharded
from mpitrain.strategies.model_parallel.tensor import TensorParallel


class Family(NamedTuple):
    """Functions below `mpitrain/`. `processes`, `threads`: from a rank's `Session` to its `RunOutcome`; empty where
    `strategies/features.py` refuses threads. `virtual`: from a `VirtualRun` to what `result.json` holds; servers, which
    replay recorded runs, too, have their own."""

    processes: str
    threads: str = ""
    virtual: str = ""


_LOCKSTEP = "simulation.lockstep.simulate_lockstep"
_SERVERS, _PEERS = "training.parameter_server.run.run_servers", "training.decentralized.run.run_peers"
_LOCAL_SGD = "training.local_sgd.trainer.run_local_sgd"
FAMILIES: dict[type[Strategy], Family] = {
    AllReduce: Family(
        "training.synchronous.launch.run_allreduce", "training.in_threads.allreduce.run_allreduce", _LOCKSTEP
    ),
    LocalSGD: Family(_LOCAL_SGD, _LOCAL_SGD, "simulation.local_sgd.simulate_local_sgd"),
    Decentralized: Family(_PEERS, _PEERS, "simulation.peers.simulate_peers"),
    ServerStrategy: Family(_SERVERS, _SERVERS),
    Pipeline: Family("training.model_parallel.pipeline.run_pipeline", virtual=_LOCKSTEP),
    TensorParallel: Family("training.model_parallel.tensor.run_tensor", virtual=_LOCKSTEP),
    Sharded: Family("training.model_parallel.sharded.run_sharded", virtual=_LOCKSTEP),
}


def run_named(function: str, begun: Any) -> Any:
    """Call a function of the table with what it takes."""
    module, _, name = function.rpartition(".")
    return getattr(importlib.import_module(f"mpitrain.{module}"), name)(begun)
