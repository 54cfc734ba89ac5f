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
        self._keys: dict[Source, Source] = {}
        """What each source is known as: of a plain socket its descriptor, which a socket that the
        garbage collector has closed first does not know any more."""

    def watch(self, source: Source, handler: Callable[[], None]) -> None:
        """Call *handler* whenever *source* can be read."""
        key = source.fileno() if isinstance(source, socket.socket) else source
        self._poller.register(key, zmq.POLLIN)
        self._handlers[key] = handler
        self._keys[source] = key

    def unwatch(self, source: Source) -> None:
        """Before *source* is closed."""
        key = self._keys.pop(source)
        self._poller.unregister(key)
        del self._handlers[key]

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
        self._keys.clear()
