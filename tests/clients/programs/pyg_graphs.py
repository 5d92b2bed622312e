"""PyTorch Geometric as its page on distributed training shows it: a graph network in DDP with SyncBatchNorm, graphs
divided by a DistributedSampler, and the numbers of all ranks added up."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, GINConv, GraphNorm, SAGEConv, global_add_pool, global_mean_pool
from torch_geometric.utils import erdos_renyi_graph

from tests.clients.programs import recording


class Net(nn.Module):
    """Three kinds of convolutions, and what one graph comes to."""

    def __init__(self):
        super().__init__()
        self.sage, self.norm = SAGEConv(4, 16), GraphNorm(16)
        self.gat = GATConv(16, 8, heads=2)
        self.gin = GINConv(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)))
        self.out = nn.Linear(32, 1)

    def forward(self, x, edge_index, batch):
        """One number for each graph of the batch."""
        x = F.relu(self.norm(self.sage(x, edge_index), batch))
        x = F.relu(self.gin(F.elu(self.gat(x, edge_index)), edge_index))
        return self.out(torch.cat([global_mean_pool(x, batch), global_add_pool(x, batch)], 1)).squeeze(1)


def graphs():
    """The same on every rank, of many sizes."""
    torch.manual_seed(11)
    for number in range(64):
        nodes = 4 + number % 9
        edges = erdos_renyi_graph(nodes, 0.4)
        x = torch.randn(nodes, 4)
        yield Data(x=x, edge_index=edges, y=x.square().mean() + edges.shape[1] / nodes**2)


def train(rank, size):
    """The mean loss of all ranks in every epoch, and what a last pass over other graphs comes to."""
    data = list(graphs())
    sampler = DistributedSampler(data[:48], num_replicas=size, rank=rank)
    loader = DataLoader(data[:48], batch_size=6, sampler=sampler)
    torch.manual_seed(12)
    model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(Net()))
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for epoch in range(8):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for batch in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(batch.x, batch.edge_index, batch.batch), batch.y)
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * batch.num_graphs, batch.num_graphs])
        dist.all_reduce(total)
        losses.append((total[0] / total[1]).item())
    with torch.no_grad():
        for batch in DataLoader(data[48 + rank :: size], batch_size=8):
            error = F.mse_loss(model.module(batch.x, batch.edge_index, batch.batch), batch.y)
            dist.all_reduce(error, op=dist.ReduceOp.MAX)
    dist.barrier()
    assert error < losses[0]
    return losses


recording.show("pyg_graphs", train(*recording.start()))
