"""A loop of one's own that the second worker leaves after three steps. Arguments: strategy, how, watchdog_s."""

import sys
import time

import torch

import mpitrain as mt
from mpitrain.values import parse
from tests import toy

strategy, how, watchdog_s = sys.argv[1:]
model = toy.linear_float32()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = mt.wrap(model, optimizer, parse(strategy, "strategy"), watchdog_s=float(watchdog_s))
for step in range(8):
    if mt.worker_index() == 1 and step == 3:
        if how == "break":
            break
        if how == "raise":
            raise KeyError("planted")
        if how == "sleep":
            time.sleep(1000)
        sys.exit(3)
    toy.linear_loss(model, toy.Memory().reader(None, 0).batch(0, 4 * step, 4)).backward()
    optimizer.step()
mt.finish()
