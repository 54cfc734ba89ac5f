"""Trains with the method that is given, and prints what every worker ends with."""

import sys

import torch

import paceline
from paceline.testing.problems import Quadratic, centers_of, flat_parameters


def train(method: str) -> list[float]:
    """Ten steps, on larger matrices than the kit's."""
    torch.manual_seed(0)
    task = Quadratic()
    wide = torch.nn.Linear(60, 50, bias=False)
    model = torch.nn.ModuleList([task, wide])
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    optimizer = paceline.distribute(model, plain, method=method, buckets="wfbp")
    for step in range(10):
        optimizer.zero_grad()
        rows = torch.arange(240.0).sin().view(4, 60) * (1 + paceline.rank() + step)
        loss = wide(rows).square().mean() + task(centers_of(paceline.rank(), step))
        loss.backward()
        optimizer.step()
    optimizer.finish()
    return [float(value) for value in flat_parameters(model)]


if __name__ == "__main__":
    paceline.init()
    print(train(sys.argv[1]))
