"""What each worker does: trainings under the methods that its arguments name, on a model that
counts. One line for each: by how many whole gradients parameters have moved, and how many all
workers have made, by their weights."""

import sys

import torch

import paceline
from paceline.testing.problems import Counting, flat_parameters

LR, STEPS = 0.5, 8

for method in sys.argv[1:]:
    model = Counting()
    plain = torch.optim.SGD(model.parameters(), lr=LR)
    optimizer = paceline.distribute(model, plain, method=method, buckets="single")
    rank = paceline.rank()
    for _ in range(STEPS - 2 * rank):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    optimizer.finish()
    counts = -flat_parameters(model) / LR
    assert counts.max() - counts.min() < 1e-3
    print(f"rank {rank}: {method}: {counts.mean().item():.3f}", flush=True)
