"""Small trainings under a method that goes past backward, and under bsp."""

import torch
from torch import nn

import paceline
from tests.support.training import simulate


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    )


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def squares(model, x):
    return model(x).square().sum()


def train(
    method,
    workers,
    *,
    make=perceptron,
    optimizer=sgd,
    loss=squares,
    steps=9,
    buckets="wfbp",
    around=lambda rank, step, model, optimizer, schedule: None,
    backward=None,
    schedule=None,
    **keys,
):
    """Each worker's parameters in the end, and what *around* gave after each of its steps."""

    def body(rank):
        model = make()
        inner = optimizer(model)
        wrapped = paceline.distribute(
            model, inner, method=method, buckets=buckets, **keys
        )
        changes = None if schedule is None else schedule(wrapped)
        generator = torch.Generator().manual_seed(rank)
        seen = []
        for step in range(steps if isinstance(steps, int) else steps[rank]):
            x = torch.randn(4, 6, generator=generator)
            if backward is None:
                loss(model, x).backward()
            else:
                backward(step, model, wrapped, x)
            wrapped.step()
            if changes is not None:
                changes.step()
            wrapped.zero_grad()
            seen.append(around(rank, step, model, wrapped, changes))
        wrapped.finish()
        return [p.detach().clone() for p in model.parameters()], seen

    return simulate(workers, body)


def same(mine, theirs):
    """Whether two trainings ended with the same bits, on all workers."""
    return all(
        torch.equal(a, b)
        for (one, _), (other, _) in zip(mine, theirs, strict=True)
        for a, b in zip(one, other, strict=True)
    )
