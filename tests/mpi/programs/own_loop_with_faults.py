"""A loop of one's own on servers: one worker is killed in it, another one raises."""

import os
import signal
import sys

import torch

import mpitrain as mt
from tests import toy

model = toy.linear_float32()
model, optimizer = mt.wrap(model, torch.optim.SGD(model.parameters(), lr=0.125), mt.Sync(servers=2))
for step in range(12):
    optimizer.zero_grad()
    toy.linear_loss(model, {"x": torch.ones(1, 5)}).backward()
    if (mt.worker_index(), step) == (0, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    if (mt.worker_index(), step) == (2, 5):
        raise RuntimeError("planted")
    optimizer.step()
mt.finish()
torch.save(model.state_dict(), f"{sys.argv[1]}/{mt.worker_index()}.pt")
