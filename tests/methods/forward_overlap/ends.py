"""``python -m tests.methods.forward_overlap.ends``: on the ranks of a real job, what trainings of 50 steps end
with, under bsp and under methods that go past backward; rank 0 prints whether bits are the same.
With a method, a rank and a step that rank dies there, right after ``step()``."""

import os
import sys

import torch
from torch import nn

import paceline

METHODS = {"priority": "bsp", "dear": "bsp:collective=ring"}
"""Each with what its bits are to be those of."""


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())


def end(method, optimizer, steps=50, dies=(-1, -1)):
    net = model()
    inner = optimizer(net.parameters())
    wrapped = paceline.distribute(net, inner, method=method, buckets="wfbp")
    schedule = torch.optim.lr_scheduler.OneCycleLR(wrapped, 0.05, total_steps=steps + 1)
    generator = torch.Generator().manual_seed(paceline.rank())
    for step in range(steps - paceline.rank()):  # data that end unevenly
        if step % 3 == 2:
            with wrapped.no_sync():
                net(torch.randn(4, 6, generator=generator)).square().mean().backward()
        net(torch.randn(4, 6, generator=generator)).square().mean().backward()
        wrapped.step()
        if (paceline.rank(), step) == dies:
            os._exit(7)
        schedule.step()
        wrapped.zero_grad()
    wrapped.finish()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def main():
    paceline.init()
    if len(sys.argv) > 1:
        method, *where = sys.argv[1:]
        end(method, sgd, dies=tuple(map(int, where)))
        return
    for method, reference in METHODS.items():
        for optimizer in (sgd, torch.optim.AdamW):
            same = torch.equal(end(method, optimizer), end(reference, optimizer))
            if paceline.rank() == 0:
                print(method, optimizer.__name__, same, flush=True)


if __name__ == "__main__":
    main()
