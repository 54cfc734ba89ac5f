"""paceline: data-parallel PyTorch training over slow, shared or uneven networks.

How the layers stack, top to bottom; each imports only what is below it:

    cli, testing                      verbs, and the conformance kit
    distribute, training, checkpoint, worlds, report
    collectives                       schedules as data, and the one Comm
    methods, fusion                   when workers agree; in which pieces gradients travel
    network                           clusters, links, workloads: described, no I/O
    interfaces, tensors, instruments, errors, units
"""

from paceline.api import init, log, now, pace, rank, world_name, world_size
from paceline.checkpoint import load, save
from paceline.distribute import distribute
from paceline.errors import PacelineError
from paceline.methods.bsp import BSP
from paceline.network.workload import Workload
from paceline.optimizer import DistributedOptimizer
from paceline.sampler import Sampler
from paceline.stand_in import StandIn, stand_in

__version__ = "0.1.0"

__all__ = [
    "BSP",
    "DistributedOptimizer",
    "PacelineError",
    "Sampler",
    "StandIn",
    "Workload",
    "__version__",
    "distribute",
    "init",
    "load",
    "log",
    "now",
    "pace",
    "rank",
    "save",
    "stand_in",
    "world_name",
    "world_size",
]
