"""DeepSpeed on a CPU, which finds its ranks by mpi4py, with optimizer states and gradients divided (ZeRO, stages 1 to
3), accumulation and clipping; then it goes on from its checkpoint."""

import logging
import sys
import tempfile

import deepspeed
import torch
import torch.distributed as dist
from torch import nn, optim

from tests.clients.programs import recording


def train(stage, rank, size, folder):
    """Every step's loss, and those after the checkpoint once more."""
    config = {
        "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    model = recording.build_model()
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=optim.AdamW(model.parameters(), lr=0.02), config=config
    )
    losses = []

    def run(batches):
        for x, y in batches:
            loss = nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())

    batches = recording.samples(rank, size)
    run(batches)
    engine.save_checkpoint(folder, tag=f"stage{stage}")
    run(batches[:4])
    engine.load_checkpoint(folder, tag=f"stage{stage}")
    run(batches[:4])
    assert losses[8:12] == losses[12:], losses
    return losses


logging.disable(logging.WARNING)
deepspeed.init_distributed(dist_backend=sys.argv[1])  # auto_mpi_discovery
recording.keep_group()
rank, size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
assert size == 2
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
losses = [loss for stage in (1, 2, 3) for loss in train(stage, rank, size, folder[0])]
every = [torch.zeros(len(losses)) for _ in range(size)]
deepspeed.comm.all_gather(every, torch.tensor(losses))
assert every[rank].tolist() == torch.tensor(losses).tolist()
recording.show("deepspeed_zero", losses)
