# A script as people write it for torchrun and DDP, with paceline's two lines in place of
# DDP's one; no __main__ guard, no finish().
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])
local_rank = int(os.environ["LOCAL_RANK"])
assert rank == dist.get_rank()
assert world_size == dist.get_world_size()
assert 0 <= local_rank < world_size

torch.manual_seed(1234)
features = torch.randn(120, 10)
labels = (features[:, 0] + features[:, 1] > 0).long()
dataset = TensorDataset(features, labels)
sampler = DistributedSampler(dataset, shuffle=True, seed=7)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)

model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = paceline.distribute(model, optimizer)

for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    total = torch.zeros(2)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += torch.tensor([loss.item() * len(y), len(y)])
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    dist.barrier()
    if rank == 0:
        print(f"epoch {epoch}: loss {total[0] / total[1]:.4f}")

model.eval()
with torch.no_grad():
    correct = (
        model(features[rank::world_size]).argmax(1) == labels[rank::world_size]
    ).sum()
dist.all_reduce(correct)
if rank == 0:
    print(f"accuracy {correct.item() / len(labels):.4f}")
dist.barrier()
dist.destroy_process_group()
