"""Where a model lies on its servers, and with which of them one worker deals.

A model is cut into *shards* (see `shards`). Either servers share them out, one each, for all
workers; or there is one shard, all of the model, and each server holds a copy of it for its
group of workers. Servers that hold copies tell each other what they have applied, and at the
first of them all workers meet: what is loaded there reaches the others before anybody is
answered (see `groups.server`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from paceline.errors import UsageError


class Layout(Protocol):
    """Servers and shards are known by their numbers."""

    @property
    def servers(self) -> Sequence[int]:
        """Those that hold something of the model, in order."""
        ...

    @property
    def homes(self) -> Sequence[int]:
        """Those that this worker pushes to and pulls from, in order."""
        ...

    @property
    def meets_at(self) -> Sequence[int]:
        """Those at which all workers wait for each other, one after the other."""
        ...

    def holders(self, shard: int) -> Sequence[int]:
        """The servers that hold a shard: until training begins each is loaded by itself."""
        ...

    def home(self, shard: int) -> int:
        """The one of them that this worker pushes to and pulls from."""
        ...

    def fed_by(self, server: int) -> Collection[int]:
        """Whose parameters are new, once all have met at *server* and loaded it."""
        ...


class SharedOut:
    """The `Layout` of servers that hold a shard each: these *shards*."""

    def __init__(self, shards: Sequence[int]) -> None:
        self.servers = self.homes = self.meets_at = shards

    def holders(self, shard: int) -> Sequence[int]:
        return (shard,)

    def home(self, shard: int) -> int:
        return shard

    def fed_by(self, server: int) -> Collection[int]:
        return (server,)


class Copies:
    """The `Layout` of so many *servers* that hold all of the model each; this worker's is number
    *group*."""

    def __init__(self, servers: int, group: int) -> None:
        self.servers = range(servers)
        self.meets_at = (0,)
        self._home = group

    @property
    def homes(self) -> Sequence[int]:
        return (self._home,)

    def holders(self, shard: int) -> Sequence[int]:
        return self.servers

    def home(self, shard: int) -> int:
        return self._home

    def fed_by(self, server: int) -> Collection[int]:
        return self.servers

    def move(self, group: int) -> None:
        """From now on another server is this worker's. Raises `UsageError` for one that there
        is not."""
        if group not in self.servers:
            raise UsageError(
                f"group {group}: expected the number of a server, 0 to "
                f"{len(self.servers) - 1}"
            )
        self._home = group
