"""Small simulations: a body per worker, and what each returned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import paceline
from paceline.cluster import Cluster, Rack
from paceline.runtimes.simulated import Simulation

LINK = 25e6
"""200 Mbit/s, in bytes per second."""
LATENCY = 50e-6


def rack(workers: int, link: float = LINK, latency: float = LATENCY, **keys) -> Rack:
    return Rack(workers=workers, link=link, latency=latency, **keys)


def cluster(*racks: Rack) -> Cluster:
    return Cluster(racks)


def simulation(where: int | Cluster, **options: Any) -> Simulation:
    """On a cluster, or on so many workers of one rack."""
    return Simulation(
        cluster(rack(where)) if isinstance(where, int) else where, **options
    )


def run(where: int | Cluster, body: Callable[[int], Any], **options: Any) -> list[Any]:
    """What *body* returned on each worker, in rank order."""
    return run_on(simulation(where, **options), body)


def run_on(runtime: Simulation, body: Callable[[int], Any]) -> list[Any]:
    answers: list[Any] = [None] * runtime.cluster.workers

    def main(rank: int) -> None:
        paceline.init()
        answers[rank] = body(rank)

    runtime.run(main)
    return answers


def until_over(over: threading.Event) -> None:
    """What watches a clock that nobody needs to watch."""
    over.wait()
