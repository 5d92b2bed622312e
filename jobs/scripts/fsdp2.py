"""A script for torch's FSDP2 as everybody writes it; one word is new.

srun --mpi=pmix python jobs/scripts/fsdp2.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("mpi4py")

x, y = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=32, sampler=sampler)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for epoch in range(10):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

accuracy = (model(data.tensors[0]).argmax(dim=1) == data.tensors[1]).float().mean()
if dist.get_rank() == 0:
    print(f"accuracy {accuracy:.3f}")
dist.destroy_process_group()
