"""torch RPC: half of the rows on each of two servers as remote modules, distributed autograd and optimizer, the tower
by DDP over gloo on the two workers, as torch's tutorial combines them. Ranks 0 and 1 are the servers."""

import os

import torch
from measuring.beside import answer_with, settings
from measuring.ranking import RemoteTables
from ranking_turns import answer_turns
from torch import distributed as dist
from torch.distributed import rpc

from mpitrain.training.synchronous.ddp import data_parallel

SERVERS = 2
told, rank = settings(), int(os.environ["RANK"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
workers = dist.new_group([2, 3])
options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, init_method=f"file://{told['meeting']}")
rpc.init_rpc(f"rank{rank}", rank=rank, world_size=4, rpc_backend_options=options)


def together(module):
    return data_parallel(module, workers)


way = None
if rank >= SERVERS:
    way = RemoteTables(told["rows"], told["batch"], rank - SERVERS, SERVERS, told["hidden"], together)
answer_with(answer_turns(way, told["batch"], dist.barrier))
os._exit(0)  # all end with their pipes at once; a shutdown would wait for the others
