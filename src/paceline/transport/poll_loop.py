"""A loop that waits for sockets and descriptors, and calls who reads them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import zmq

Source = zmq.Socket[Any] | socket.socket | int
"""An integer is a descriptor."""


class PollLoop:
    """Sockets and descriptors, each with the handler to call when something is there."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._handlers: dict[Source, Callable[[], None]] = {}

    def watch(self, source: Source, handler: Callable[[], None]) -> None:
        """Call *handler* whenever *source* can be read."""
        self._poller.register(source, zmq.POLLIN)
        self._handlers[_key(source)] = handler

    def unwatch(self, source: Source) -> None:
        """Before *source* is closed."""
        self._poller.unregister(source)
        del self._handlers[_key(source)]

    def handle(self, milliseconds: int | None) -> bool:
        """Wait until something is there, at most so long (None: for ever), and handle it.
        Returns whether there was anything."""
        events = self._poller.poll(milliseconds)
        for ready, _ in events:
            # Handled before, another may have closed this one.
            handler = self._handlers.get(ready)
            if handler is not None:
                handler()
        return bool(events)

    def let_go(self) -> None:
        """Nothing is handled any more, and no handler is kept alive."""
        self._handlers.clear()


def _key(source: Source) -> Source:
    """What the poller reports: of a plain socket, its descriptor."""
    return source.fileno() if isinstance(source, socket.socket) else source
