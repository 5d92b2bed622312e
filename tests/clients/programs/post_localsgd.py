"""DDP with torch's post-local SGD: gradients are averaged for three steps, afterwards parameters every second step."""

from torch import distributed as dist
from torch import optim
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hooks
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.clients.programs.recording import build_model, keep_group, samples, show, start, steps


def train(rank, size):
    """The losses of this rank."""
    model = DistributedDataParallel(build_model())
    subgroup, _ = dist.new_subgroups(1)
    keep_group(subgroup)
    state = hooks.PostLocalSGDState(process_group=None, subgroup=subgroup, start_localSGD_iter=3)
    model.register_comm_hook(state, hooks.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        optim.SGD(model.parameters(), lr=0.05), PeriodicModelAverager(period=2, warmup_steps=3)
    )
    return steps(model, optimizer, samples(rank, size))


if __name__ == "__main__":
    show("post_localsgd", train(*start()))
