"""An examination in virtual time."""

from __future__ import annotations

from collections.abc import Callable

from paceline.cluster import Cluster
from paceline.runtimes.join import join_runtime
from paceline.runtimes.simulated import Simulation
from paceline.tools.doctor.evidence import Evidence
from paceline.tools.doctor.measure import Examination


def examined(
    simulation: Simulation, deliver: Callable[[Evidence], None], seconds: float = 0.1
) -> None:
    """Let *simulation*, which has not run, examine what its workers train; *deliver* is given
    the evidence."""
    for rank in range(simulation.cluster.workers):
        Examination(simulation.runtime_of(rank), deliver, seconds=seconds)


def examined_network(cluster: Cluster, seconds: float = 0.1) -> Evidence:
    """Of the network alone."""
    found: list[Evidence] = []
    simulation = Simulation(cluster)
    examined(simulation, found.append, seconds)

    def body(rank: int) -> None:
        runtime = join_runtime()
        runtime.connect()
        runtime.recorder.begin("bsp")  # rules count from here

    simulation.run(body)
    return found[-1]
