"""The virtual world: real tensors and gradients, virtual time and network.

Read `clock` first, then `links` and `communicator`, `backend`, `world`, `simulation`.
"""

from paceline.worlds.virtual.compute import ComputeModel
from paceline.worlds.virtual.simulation import Simulation, SimulationResult

__all__ = ["ComputeModel", "Simulation", "SimulationResult"]
