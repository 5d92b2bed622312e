"""What a shard writes in an emergency, and when it cannot."""

from types import SimpleNamespace

import pytest
import torch

import mpitrain as mt
from mpitrain.errors import CheckpointError
from mpitrain.model import flat_model, shard_store
from mpitrain.reporting.report import NullReport
from mpitrain.roles import FaultTolerantServer
from mpitrain.training.parameter_server.emergency_state import shard_writer
from mpitrain.training.watchdog.emergency import Emergency
from tests import toy


def test_nothing_is_written_of_options_that_hooks_on_the_workers_change():
    """Where the schedulers stand only workers know: who went on without would begin them anew."""
    module, strategy = toy.perceptron(), mt.Async()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    model = flat_model(module, optimizer, strategy)
    store = shard_store(model, 0, optimizer, strategy)
    server = FaultTolerantServer(strategy, store, (1,), NullReport())
    orders = SimpleNamespace(
        overrides=SimpleNamespace(watchdog_s=1.0), job=SimpleNamespace(step_samples=1), strategy=strategy
    )
    writer, _, _ = shard_writer(orders, server, store, None, module)
    assert isinstance(writer, Emergency)
    assert writer.take().state["store"]["optimizer"]["param_groups"][0]["lr"] == 0.5
    store.hear_options('{"0": {"lr": 0.25}}')
    with pytest.raises(CheckpointError, match="hooks have changed the optimizer's options"):
        writer.take()
