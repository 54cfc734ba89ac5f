"""What a worker asks of its server process, and what that answers: see `pool`."""

from __future__ import annotations

import msgspec


class Order(msgspec.Struct, kw_only=True):
    """A server is wanted for one training."""

    name: str
    workers: int
    bind: str
    token: str


class Place(msgspec.Struct, kw_only=True):
    """Where it listens; or, with *fault*, why it does not."""

    port: int = 0
    fault: str = ""
