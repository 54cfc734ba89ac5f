"""The virtual world: real tensors and gradients, virtual time and network.

Read `clock` first, then `cluster.links` and `comm`, `process_group`, `runtime`, `simulation`.
"""

from paceline.runtimes.simulated.compute import ComputeModel
from paceline.runtimes.simulated.simulation import Simulation, SimulationResult

__all__ = ["ComputeModel", "Simulation", "SimulationResult"]
