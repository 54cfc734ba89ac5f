"""Trainings under ds-sync in the simulated runtime, whose workers' models are looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import paceline
from paceline.cluster import Cluster, uniform_cluster
from paceline.runtimes.simulated import Simulation
from paceline.testing import inspect

SIZE = 400
"""Elements of `Walk`."""


class Walk(torch.nn.Module):
    """Its gradient is what it is called with: under SGD at a rate of 1 each worker walks by
    that."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.place = torch.nn.Parameter(torch.full((SIZE,), start))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return (self.place * noise).sum()


def simulate(
    cluster: int | Cluster, body: Callable[[int], Any]
) -> tuple[list[Any], Simulation]:
    """What *body* gives on each simulated worker; and the simulation."""
    if isinstance(cluster, int):
        cluster = uniform_cluster(cluster, "1gbit", "50us")
    simulation = Simulation(cluster)
    results: list[Any] = [None] * cluster.workers

    def main(rank: int) -> None:
        results[rank] = body(rank)

    simulation.run(main)
    return results, simulation


def walk(method: Any, workers: int, steps: int, own: bool = False) -> torch.Tensor:
    """Each worker's place after each step (steps x workers x `SIZE`), of a walk by unit noise;
    or, with *own* starts and no noise, of places that differ in the beginning."""

    def body(rank: int) -> list[torch.Tensor]:
        model = Walk()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = paceline.distribute(model, inner, method=method)
        noise = torch.Generator().manual_seed(rank)
        if own:
            with torch.no_grad():
                model.place.normal_(generator=noise)
        places = []
        for _ in range(steps):
            optimizer.zero_grad()
            change = torch.zeros(SIZE)
            if not own:
                change.normal_(generator=noise)
            model(change).backward()
            optimizer.step()
            places.append(model.place.detach().clone())
        optimizer.finish()
        return places

    results, _ = simulate(workers, body)
    return torch.stack([torch.stack(places) for places in results], dim=1)


def spread(places: torch.Tensor) -> torch.Tensor:
    """The mean square distance of workers from their mean, after each step."""
    return (places - places.mean(1, keepdim=True)).square().mean((1, 2))


def worker_of(optimizer: torch.optim.Optimizer) -> Any:
    """The method's worker."""
    return inspect(optimizer).worker


def equal(models: Sequence[torch.nn.Module]) -> bool:
    """Whether all have the same parameters and buffers, to the bit."""
    first, *others = [model.state_dict() for model in models]
    return all(torch.equal(first[key], other[key]) for other in others for key in first)
