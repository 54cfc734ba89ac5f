"""What a worker asks of its service process, and what that answers: see `pool`; and what a
supervisor and its servers say to each other: see `__main__`."""

from __future__ import annotations

import msgspec

from paceline.transport.peers import PeerAddress


class Order(msgspec.Struct, tag="start", kw_only=True):
    """A service is wanted: one of `kinds`. *services*, *peers*: as in `interfaces.Start`."""

    name: str
    kind: str = "server"
    workers: int
    services: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    bind: str
    token: str


class Introduction(msgspec.Struct, tag="introduce", kw_only=True):
    """The service that listens at *port* is to connect to these *peers*, as number *sender*, which
    was started *life* times before."""

    port: int
    sender: int
    peers: dict[str, PeerAddress]
    life: int = 0


class Place(msgspec.Struct, kw_only=True):
    """Where it listens; or, with *fault*, why it does not."""

    port: int = 0
    fault: str = ""


class IsDone(msgspec.Struct, tag="done", kw_only=True):
    """The script of *worker* has ended well: it does not come back."""

    worker: int


class IsLost(msgspec.Struct, tag="lost", kw_only=True):
    """Another server of the job has taken this life of *worker* for lost."""

    worker: int
    incarnation: int


class Listens(msgspec.Struct, tag="listens", kw_only=True):
    """A supervised server listens at *port*, and goes on with *step*."""

    port: int
    step: int


class Evicted(msgspec.Struct, tag="evicted", kw_only=True):
    """A server has taken this life of *worker* for lost: nothing is heard of it."""

    worker: int
    incarnation: int


class Over(msgspec.Struct, tag="over", kw_only=True):
    """All workers have said goodbye to a server; it holds what they have trained until its input
    ends, for another life of one of them."""


class Entered(msgspec.Struct, tag="entered", kw_only=True):
    """A server that was to take over what its peers hold has done so."""


class Gone(msgspec.Struct, tag="gone", kw_only=True):
    """A server whose group has no workers gets nothing from its peers any more: what it holds is of
    before, until it says that it has entered."""
