"""torchft: its LocalSGD, or its DiLoCo with buckets, by its manager with gloo; every process is a replica of its own.

The lighthouse looks every 5 ms whether all replicas have come (100 ms by default, which would be in every averaging).
"""

import logging
import os
from datetime import timedelta

import torch
from measuring.beside import answer_with, settings
from rounds import OUTER, Meeting, Worker, answer_for
from torch.distributed import TCPStore

os.environ["RUST_LOG"] = "warn"  # each averaging would print twenty lines
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD

logging.disable(logging.WARNING)
told, meeting = settings(), Meeting()
worker = Worker(told["model"], meeting.rank)
lighthouse = None
if meeting.rank == 0:
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=meeting.size, quorum_tick_ms=5)
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
hour = timedelta(hours=1)
manager = Manager(
    pg=ProcessGroupGloo(timeout=hour), load_state_dict=worker.module.load_state_dict,
    state_dict=worker.module.state_dict, min_replica_size=meeting.size, use_async_quorum=False, init_sync=False,
    timeout=hour, quorum_timeout=hour, rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
    lighthouse_addr=meeting.told(lighthouse and lighthouse.address()), replica_id=f"replica_{meeting.rank}",
    hostname="127.0.0.1",
)  # fmt: skip
if told["how"] == "diloco":
    outer = torch.optim.SGD(worker.module.parameters(), **OUTER)
    rule = DiLoCo(manager, [worker.module], worker.optimizer, outer, told["period"], use_bucketization=True)
else:
    rule = LocalSGD(manager, worker.module, worker.optimizer, sync_every=told["period"])
with rule:
    answer_with(answer_for(worker, meeting))
manager.shutdown(wait=False)
