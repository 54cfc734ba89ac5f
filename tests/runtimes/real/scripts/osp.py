"""Train with a method by all-reduce and deferral; leave what came out.

torchrun --nproc-per-node 2 osp.py FOLDER METHOD...
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import paceline


def main():
    folder, *methods = sys.argv[1:]
    paceline.init()
    rank = paceline.rank()
    for number, method in enumerate(methods):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 5))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = paceline.distribute(model, optimizer, method=method, buckets="wfbp")
        data = torch.Generator().manual_seed(100 + rank)
        losses = []
        for step in range(45 - 3 * rank):  # rank 1 runs out of data first
            x = torch.randn(6, 12, generator=data)
            y = torch.randint(5, (6,), generator=data)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step(loss=loss)
            losses.append(loss.item())
            if step % 10 == 5:
                with optimizer.consolidated():
                    losses.append(model[0].weight.sum().item())
        optimizer.finish()
        state = {**model.state_dict(), "losses": torch.tensor(losses)}
        torch.save(state, Path(folder) / f"{number}-{rank}.pt")


if __name__ == "__main__":
    main()
