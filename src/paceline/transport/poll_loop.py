"""Waits for sockets and descriptors, and calls their handlers."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import zmq

Source = zmq.Socket[Any] | socket.socket | int
"""An integer is a file descriptor."""


class PollLoop:
    """Sockets and descriptors, each with a handler that is called when it can be read."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._handlers: dict[Source, Callable[[], None]] = {}
        self._keys: dict[Source, Source] = {}
        """Each source's key in the poller. A plain socket's key is its descriptor, because a socket
        that the garbage collector has closed no longer knows its descriptor."""

    def watch(self, source: Source, handler: Callable[[], None]) -> None:
        """Call *handler* whenever *source* can be read."""
        key = source.fileno() if isinstance(source, socket.socket) else source
        self._poller.register(key, zmq.POLLIN)
        self._handlers[key] = handler
        self._keys[source] = key

    def unwatch(self, source: Source) -> None:
        """Stop watching *source*; call this before *source* is closed."""
        key = self._keys.pop(source)
        self._poller.unregister(key)
        del self._handlers[key]

    def handle(self, milliseconds: int | None) -> bool:
        """Wait until a source can be read, and call the handlers of all such sources.

        *milliseconds*: the longest wait; None: no limit. Returns whether any source could be read.
        """
        events = self._poller.poll(milliseconds)
        for ready, _ in events:
            # An earlier handler may have closed this source.
            handler = self._handlers.get(ready)
            if handler is not None:
                handler()
        return bool(events)

    def clear(self) -> None:
        """Stop calling handlers, and drop all references to them."""
        self._handlers.clear()
        self._keys.clear()
