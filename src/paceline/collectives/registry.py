"""The registry of all-reduce algorithms, one row each, and the `Comm` over them.

``COLLECTIVES`` maps a collective's name to its class. `make` finds one by name, and `over`
makes a training's communicator form its averages so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

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
from paceline.collectives.in_network.algorithms import Aggregated
from paceline.collectives.in_network.atp import ATP
from paceline.collectives.in_network.rina import Rina
from paceline.collectives.in_network.switchml import SwitchML
from paceline.errors import UnknownNameError, unknown
from paceline.interfaces import Collective, Endpoint, Runtime

if TYPE_CHECKING:
    from paceline.collectives.communicator import TorchComm

CPU = torch.device("cpu")

COLLECTIVES: dict[str, type[Collective]] = {
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


def make(name: str) -> Collective:
    """The collective of that name; raises `UsageError` for one that there is not."""
    if name not in COLLECTIVES:
        raise UnknownNameError(unknown("value for collective", name, COLLECTIVES))
    return COLLECTIVES[name]()


def over(
    collective: Collective,
    runtime: Runtime,
    comm: TorchComm,
    endpoints: Sequence[Endpoint] = (),
    device: torch.device = CPU,
) -> TorchComm:
    """*comm*'s workers, whose averages are formed by *collective*; *endpoints* are this
    worker's ends of the servers, where it needs some, *device* where buffers will be. Use
    this one and no more *comm*. Collective."""
    from paceline.collectives.communicator import TorchComm
    from paceline.collectives.server_communicator import ServerComm

    if collective.needs_servers:
        return ServerComm(runtime, comm.name, endpoints, comm.process_group)
    if isinstance(collective, Native):
        return comm
    on_streams = device.type == "cuda" and comm.follows_streams
    if isinstance(collective, Hierarchical) and on_streams and comm.size > 1:
        comm.tell(
            "collective=hierarchical is native under NCCL, which performs no schedules and "
            "picks an algorithm for the topology by itself"
        )
        return comm
    made = TorchComm(
        runtime,
        comm.name,
        comm.process_group,
        collective=collective,
        places=comm.places,
    )
    told = ""
    if isinstance(collective, Auto):
        told = collective.begin(made, runtime, device)
    elif isinstance(collective, Aggregated):
        told = collective.begin(made, runtime)
    if told:
        made.tell(told)
    return made


__all__ = ["COLLECTIVES", "make", "over"]
