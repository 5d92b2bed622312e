"""pytorch-metric-learning: an embedding whose loss and mining compare the samples of all ranks, by its wrappers of both
and a memory of earlier batches."""

from pytorch_metric_learning import losses, miners
from pytorch_metric_learning.utils import distributed
from torch import optim
from torch.nn.parallel import DistributedDataParallel

from tests.clients.programs import recording


def train(rank, size):
    """The losses of three ways to compare."""
    model = DistributedDataParallel(recording.build_model()[:2])
    of_memory = losses.CrossBatchMemory(losses.NTXentLoss(), 16, memory_size=24)
    wanted = [
        (losses.TripletMarginLoss(margin=0.5), miners.MultiSimilarityMiner(), False),
        (losses.NTXentLoss(), miners.MultiSimilarityMiner(0.3), True),
        (of_memory, miners.MultiSimilarityMiner(0.3), False),
    ]
    seen = []
    for kind, miner, efficient in wanted:
        loss_of = distributed.DistributedLossWrapper(kind, efficient=efficient)
        mine = distributed.DistributedMinerWrapper(miner, efficient=efficient)
        optimizer = optim.SGD(model.parameters(), lr=0.05)
        for x, _ in recording.samples(rank, size):
            optimizer.zero_grad()
            embeddings, labels = model(x), (x.sum(1) > 0).long()
            loss = loss_of(embeddings, labels, mine(embeddings, labels))
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    return seen + [float(sum(value.abs().sum() for value in model.state_dict().values()))]


rank, size = recording.start()
recording.put("metric_learning", train(rank, size), recording.carried_by())
