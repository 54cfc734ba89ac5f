"""A small network trained under ds-sync by simulated workers, each on data of its own."""

import pytest
import torch
from torch import nn

import paceline
from tests.methods.ds_sync.helpers import simulate

OVERLAPS = ["none", "forward", "step"]


def network():
    """The same on every worker; with BatchNorm's statistics."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3), nn.Linear(3, 2)
    )


def batch(rank, step):
    """Of each worker and step another one."""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * rank + step))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.003, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def begin(method, make=sgd, buckets="wfbp", **more):
    model = network()
    optimizer = paceline.distribute(
        model, make(model.parameters()), method=method, buckets=buckets, **more
    )
    return model, optimizer


def step(model, optimizer, number):
    optimizer.zero_grad()
    model(batch(paceline.rank(), number)).square().sum().backward()
    optimizer.step()


def train(method, workers, steps, make=sgd, each=lambda model, optimizer: None, **more):
    """Each worker's model at the end, and what *each* gave after its steps; *steps*: of all, or
    of each."""
    steps = (steps,) * workers if isinstance(steps, int) else steps

    def body(rank):
        model, optimizer = begin(method, make, **more)
        seen = []
        for number in range(steps[rank]):
            step(model, optimizer, number)
            seen.append(each(model, optimizer))
        optimizer.finish()
        return model, seen

    results, _ = simulate(workers, body)
    return results


def models(results):
    return [model for model, _ in results]


def each_once(values):
    """All pairs of *values* and overlaps; of the fast ones each value has one overlap, by
    turns."""
    return [
        pytest.param(
            value,
            overlap,
            marks=[] if (i + j) % len(OVERLAPS) == 0 else pytest.mark.slow,
        )
        for i, value in enumerate(values)
        for j, overlap in enumerate(OVERLAPS)
    ]
