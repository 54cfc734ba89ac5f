"""What a worker asks of its service process, and what that answers: see `pool`."""

from __future__ import annotations

import msgspec


class Order(msgspec.Struct, tag="start", kw_only=True):
    """A service is wanted: one of `kinds`. *services*, *peers*: as in `kinds.Start`."""

    name: str
    kind: str = "server"
    spec: str = ""
    workers: int
    services: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    bind: str
    token: str


class PeerAddress(msgspec.Struct, kw_only=True):
    """Where a peer listens, and the token that it asks for."""

    host: str
    port: int
    token: str


class Introduction(msgspec.Struct, tag="introduce", kw_only=True):
    """The service that listens at *port* is to connect to these *peers*, as number *sender*."""

    port: int
    sender: int
    peers: dict[str, PeerAddress]


class Place(msgspec.Struct, kw_only=True):
    """Where it listens; or, with *fault*, why it does not."""

    port: int = 0
    fault: str = ""
