"""Where all ranks learn how the others end: rank 0's side of `peer_monitor`."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import sys
import threading
import time
from functools import partial

import msgspec

from paceline.interfaces.trainings import Place
from paceline.runtimes.real import addresses
from paceline.runtimes.real.hang_report import Hangs, Whereabouts
from paceline.runtimes.real.job_store import Address, Board
from paceline.timeouts import timeouts
from paceline.transport import liveness
from paceline.transport.poll_loop import PollLoop

LINE_BYTES = 4096
STRANGERS = 16
"""Connections that have not said hello, beyond one for each rank."""

KEY = "paceline/liveness"
"""Of the hub's address."""


class Hello(msgspec.Struct, kw_only=True):
    """A rank introduces itself."""

    token: str
    rank: int
    host: str
    process: int


class News(msgspec.Struct, kw_only=True):
    """How a rank ended: well (no *fault*), or how not. With *training*, it is only that
    training which has ended for it."""

    rank: int
    fault: str | None = None
    training: int | None = None
    place: Place | None = None
    """The rank goes on, and tells where it is; so many ranks are *present*."""
    present: int = 0
    where: Whereabouts | None = None
    """The rank goes on; it waits for others, or was asked for this."""
    asks: bool = False
    """The rank that hears this is to say where it is."""


class Hub:
    """Rank 0's side: hears from all ranks, passes the first bad news on to all, and names
    the rank that the others wait for."""

    def __init__(self, size: int, meeting: addresses.Meeting, board: Board) -> None:
        self._size = size
        self._hangs = Hangs()
        self._token = board.new_token()
        self._listener = socket.create_server(
            (meeting.bind, 0),
            family=addresses.family_of(meeting.bind),
            backlog=min(size, 1024),
        )
        self._listener.setblocking(False)
        self._callers = liveness.Callers(size + STRANGERS, LINE_BYTES)
        self._ranks: dict[socket.socket, Hello] = {}
        self._loop = PollLoop()
        self._loop.watch(self._listener, self._accept)
        self._wake, self._waker = socket.socketpair()
        self._loop.watch(self._waker, self._begin_to_close)
        self._closing = False
        for end in (self._listener, self._wake, self._waker):
            liveness.close_in_children(end)
        port = self._listener.getsockname()[1]
        board.post(KEY, Address(host=meeting.publish, port=port, token=self._token))
        self._thread = threading.Thread(
            target=self._serve, name="paceline liveness hub", daemon=True
        )
        self._thread.start()

    @property
    def present(self) -> set[int]:
        """The ranks that have said hello, and have not ended."""
        return {hello.rank for hello in list(self._ranks.values())}

    def close(self) -> None:
        """Rank 0 ends: whoever is still connected is told that this is well."""
        self._wake.close()
        self._thread.join(timeout=timeouts.collective_grace)

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._loop.handle(self._hangs.milliseconds(time.monotonic()))
                self._name_hangs()
            # Hear what has come already: bad news goes first.
            while self._loop.handle(0):
                pass
            self._tell_all(News(rank=0))
        finally:
            self._loop.let_go()
            self._callers.close_all()
            self._listener.close()
            self._waker.close()

    def _begin_to_close(self) -> None:
        self._loop.unwatch(self._waker)
        self._closing = True

    def _accept(self) -> None:
        peer = self._callers.accept(self._listener, self._drop)
        if peer is not None:
            self._loop.watch(peer, partial(self._read, peer))

    def _read(self, peer: socket.socket) -> None:
        said = self._callers.read(peer)
        try:
            for line in said.lines:
                self._hear(peer, line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self._lose(peer)  # not one of ours, or no longer
            return
        if said.over:
            self._lose(peer, said.error)

    def _hear(self, peer: socket.socket, line: bytes) -> None:
        if peer not in self._ranks:
            hello = msgspec.json.decode(line, type=Hello)
            known = hmac.compare_digest(hello.token.encode(), self._token.encode())
            if not (known and 0 <= hello.rank < self._size):
                raise msgspec.ValidationError("a wrong token")
            self._ranks[peer] = hello
            self._callers.know(peer)
            return
        news = msgspec.json.decode(line, type=News)
        if news.place is not None:
            told = News(rank=self._ranks[peer].rank, place=news.place)
            told.present = len(self._ranks)
            self._tell_all(told)
            return
        if news.where is not None:
            if self._hangs.hear(self._ranks[peer].rank, news.where, time.monotonic()):
                self._tell_all(News(rank=0, asks=True), but=peer)
            return
        hello = self._ranks.pop(peer)
        if news.fault is not None:
            words = News(rank=hello.rank, fault=news.fault, training=news.training)
            self._tell_all(words)
        if news.training is not None:
            self._ranks[peer] = hello  # it goes on, and may end otherwise

    def _lose(self, peer: socket.socket, error: OSError | None = None) -> None:
        hello = self._ranks.pop(peer, None)
        self._drop(peer)
        if hello is not None:
            fault = f"{_process_of(hello)} {liveness.how_it_ended(error)}"
            self._tell_all(News(rank=hello.rank, fault=fault))

    def _drop(self, peer: socket.socket) -> None:
        self._loop.unwatch(peer)
        self._callers.close(peer)

    def _name_hangs(self) -> None:
        if not self._hangs.is_due(len(self._ranks), time.monotonic()):
            return
        present = {hello.rank: _process_of(hello) for hello in self._ranks.values()}
        said = self._hangs.conclude(present, time.monotonic())
        if said:
            # On a thread, once per hang: a terminal that is held up must not hold up the hub.
            threading.Thread(target=_print, args=(said,), daemon=True).start()

    def _tell_all(self, news: News, but: socket.socket | None = None) -> None:
        for peer in list(self._ranks):
            if peer is not but:
                with contextlib.suppress(OSError):
                    peer.send(line_of(news))  # fits into an idle connection's buffer


def make_hub(size: int, board: Board) -> Hub | None:
    """Rank 0's hub, which the *board* tells all of; or, where it cannot listen, why not."""
    try:
        return Hub(size, addresses.at_master(size), board)
    except OSError as error:
        address = os.environ.get("MASTER_ADDR", addresses.LOOPBACK)
        fault = f"rank 0 cannot listen on MASTER_ADDR {address}: {error}"
        board.post(KEY, Address(fault=fault))
        return None


def _process_of(hello: Hello) -> str:
    return f"(host {hello.host}, process {hello.process})"


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
        print(text, file=sys.stderr, flush=True)


def line_of(words: msgspec.Struct) -> bytes:
    """*words* as they travel."""
    return msgspec.json.encode(words) + b"\n"
