"""The registry of all-reduce algorithms.

``COLLECTIVES`` maps an algorithm's name to its class. `make` finds one by name, and `attach` makes
a training's communicator use it for averages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.collectives.algorithms import (
    HalvingDoubling,
    Hierarchical,
    Native,
    ParameterServer,
    Ring,
    Tree,
)
from paceline.collectives.autotune import Auto
from paceline.collectives.communicator import Communicator
from paceline.collectives.in_network.algorithms import (
    ATP,
    InNetworkAllReduce,
    Rina,
    SwitchML,
)
from paceline.collectives.server_communicator import ServerCommunicator
from paceline.errors import UnknownNameError, unknown
from paceline.interfaces import AllReduceAlgorithm, Endpoint, Runtime

CPU = torch.device("cpu")

COLLECTIVES: dict[str, type[AllReduceAlgorithm]] = {
    ATP.name: ATP,
    Auto.name: Auto,
    HalvingDoubling.name: HalvingDoubling,
    Hierarchical.name: Hierarchical,
    Native.name: Native,
    ParameterServer.name: ParameterServer,
    Rina.name: Rina,
    Ring.name: Ring,
    SwitchML.name: SwitchML,
    Tree.name: Tree,
}


def make(name: str) -> AllReduceAlgorithm:
    """The collective with this name; raises `UsageError` for an unknown name."""
    if name not in COLLECTIVES:
        raise UnknownNameError(unknown("value for collective", name, COLLECTIVES))
    return COLLECTIVES[name]()


def attach(
    collective: AllReduceAlgorithm,
    runtime: Runtime,
    comm: Communicator,
    endpoints: Sequence[Endpoint] = (),
    device: torch.device = CPU,
) -> Communicator:
    """Return a communicator of *comm*'s workers that averages by *collective*. Collective.

    Use it instead of *comm* from then on. *endpoints* are this worker's connections to servers, for
    collectives that need servers. *device* is where buffers will be.
    """
    if collective.needs == "servers":
        return ServerCommunicator(runtime, comm.name, endpoints, comm.workers)
    if isinstance(collective, Native):
        return comm
    on_streams = device.type == "cuda" and comm.follows_streams
    if isinstance(collective, Hierarchical) and on_streams and comm.size > 1:
        comm.log(
            "collective=hierarchical is native under NCCL, which performs no schedules and "
            "chooses an algorithm for the topology itself"
        )
        return comm
    made = Communicator(
        runtime,
        comm.name,
        comm.workers,
        collective=collective,
        placement=comm.placement,
    )
    message = ""
    if isinstance(collective, Auto):
        message = collective.setup(made, runtime, device)
    elif isinstance(collective, InNetworkAllReduce):
        message = collective.setup(made, runtime)
    if message:
        made.log(message)
    return made


__all__ = ["COLLECTIVES", "attach", "make"]
