"""How an average is formed: the registry of collectives, one row each, and the `Comm` over them.

``COLLECTIVES`` maps a collective's name to its class. `make` finds one by name, and `over`
makes a training's communicator form its averages so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.collectives.rows import (
    HalvingDoubling,
    Hierarchical,
    Native,
    ParameterServer,
    Ring,
    Tree,
)
from paceline.errors import UsageError, unknown
from paceline.interfaces import Collective, Endpoint, World

if TYPE_CHECKING:
    from paceline.collectives.comm import TorchComm

COLLECTIVES: dict[str, type[Collective]] = {
    HalvingDoubling.name: HalvingDoubling,
    Hierarchical.name: Hierarchical,
    Native.name: Native,
    ParameterServer.name: ParameterServer,
    Ring.name: Ring,
    Tree.name: Tree,
}


def make(name: str) -> Collective:
    """The collective of that name; raises `UsageError` for one that there is not."""
    if name not in COLLECTIVES:
        raise UsageError(unknown("value for collective", name, COLLECTIVES))
    return COLLECTIVES[name]()


def over(
    collective: Collective,
    world: World,
    comm: TorchComm,
    endpoints: Sequence[Endpoint] = (),
) -> TorchComm:
    """*comm*'s workers, whose averages are formed by *collective*; *endpoints* are this
    worker's ends of the servers, where it needs some. Use this one and no more *comm*."""
    from paceline.collectives.comm import TorchComm
    from paceline.collectives.server import ServerComm

    if collective.needs_servers:
        return ServerComm(world, comm.name, endpoints, comm.process_group)
    if isinstance(collective, Native):
        return comm
    return TorchComm(
        world,
        comm.name,
        comm.process_group,
        collective=collective,
        racks=world.racks,
    )


__all__ = ["COLLECTIVES", "make", "over"]
