"""Lightning's Fabric with its strategy for DDP, a loop of one's own, and its reductions."""

import sys

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn, optim

from tests.clients.programs import recording

fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=sys.argv[1]))
fabric.launch()
recording.keep_group()
model = recording.build_model()
model, optimizer = fabric.setup(model, optim.Adam(model.parameters(), lr=0.02))
losses = []
for x, y in recording.samples(fabric.global_rank, fabric.world_size):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    fabric.backward(loss)
    optimizer.step()
    losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
fabric.barrier()
assert fabric.all_gather(loss.detach()).shape == (fabric.world_size,)
recording.show("fabric", losses)
