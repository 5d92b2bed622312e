"""DDP with torch's ZeroRedundancyOptimizer, each rank of which holds the state of its own parameters."""

from torch import optim
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.clients.programs.recording import build_model, samples, show, start, steps


def train(rank, size):
    """The losses of this rank."""
    model = DistributedDataParallel(build_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=optim.Adam, lr=0.02)
    losses = steps(model, optimizer, samples(rank, size))
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        assert len(optimizer.state_dict()["state"]) == 4
    return losses


if __name__ == "__main__":
    show("zero_optimizer", train(*start()))
