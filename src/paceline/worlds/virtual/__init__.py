"""The virtual world: real tensors and gradients, virtual time and network.

Read `clock` first, then `links` and `communicator`, `backend`, `world`.
"""

from paceline.worlds.virtual.compute import ComputeModel
from paceline.worlds.virtual.world import Simulation, SimulationResult

__all__ = ["ComputeModel", "Simulation", "SimulationResult"]
