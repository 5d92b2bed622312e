"""Heat, whose arrays lie divided over mpi4py's COMM_WORLD, in the processes of a DDP loop, between its steps."""

import importlib
import importlib.util
import sys
import types
from typing import Any

from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from tests.clients.programs import recording

# Heat imports torchvision, of which nothing here is used.
if not importlib.util.find_spec("torchvision"):
    absent: Any = types.ModuleType("torchvision")
    absent.transforms = absent.datasets = types.SimpleNamespace(Compose=object, MNIST=object)
    sys.modules |= {"torchvision": absent, "torchvision.transforms": absent.transforms}
heat = importlib.import_module("heat")

rank, size = recording.start()
model = DistributedDataParallel(recording.build_model())
optimizer = optim.SGD(model.parameters(), lr=0.05)
losses = []
for x, y in recording.samples(rank, size):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    every = heat.array(x, is_split=0)
    assert every.shape[0] == size * len(x)
    assert abs(heat.sum(every * every).item() - float((heat.resplit(every, None).larray ** 2).sum())) < 1e-2
    losses.append(float(heat.mean(heat.array(loss.detach().reshape(1), is_split=0))))
recording.show("heat_beside", losses)
