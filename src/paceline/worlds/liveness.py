"""Every survivor learns which rank died, whatever gloo and NCCL notice.

Theory of operation
-------------------
Each rank keeps one idle TCP connection to rank 0's hub. *Dead* is a lost connection (see
`lifelines`). Nothing is inferred from silence, so a rank that computes, compiles or evaluates
for an hour with the interpreter's lock held is not taken for dead. A rank that ends well says
goodbye first; one that ends with an error says which. The hub tells everybody; when the hub
itself is lost, everybody knows that it was rank 0.

A survivor may be blocked in a collective for ever, where Python cannot interrupt it. So
after the news it gets a few seconds to end by itself, and is then ended.

Lines of JSON, each bounded; a connection that does not begin with the hub's token is closed.
Nothing is unpickled. Threat model: ranks learn the token as `handover` says, so other users of
one machine do not have it; several machines need PACELINE_SECRET for that, else whoever
reaches torch's store reads it, and the token keeps out strays and scanners alone. It travels in the clear:
whoever reads the network between machines has it.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from paceline import lifelines
from paceline.errors import UsageError
from paceline.worlds import addresses
from paceline.worlds.handover import Address, Board, Store

GRACE_SECONDS = 3.0
"""How long a survivor may take to end by itself."""
CONNECT_SECONDS = 30.0
LINE_BYTES = 4096
FAULT_CHARACTERS = 500

_KEY = "paceline/liveness"


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


class Liveness:
    """This rank's watch over the others.

    *lost* is called once, on a thread of this object, with a sentence that names the rank
    that ended badly; *broke* for each training of another that ended with an error, with its
    number and such a sentence.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        lost: Callable[[str], None],
        broke: Callable[[int, str], None] = lambda *_: None,
    ) -> None:
        self._rank = rank
        self._lost, self._broke = lost, broke
        self._over = False
        self._hub: Hub | None = None
        self._board = Board(store, size)
        if rank == 0:
            self._hub = _make_hub(size, self._board)
        try:
            address = self._board.read(_KEY)
        except UsageError as error:
            self._goes_unwatched(f"cannot learn where rank 0 watches: {error}")
            return
        if address.fault:
            self._over = True
            if rank == 0:
                print(
                    f"paceline: {address.fault}; when a rank dies, the others will learn "
                    "it from gloo or NCCL alone",
                    file=sys.stderr,
                )
            return
        host, port = addresses.found_at(address.host), address.port
        try:
            self._socket = socket.create_connection((host, port), CONNECT_SECONDS)
        except OSError as error:
            self._goes_unwatched(f"cannot reach rank 0 at {host}:{port}: {error}")
            return
        self._socket.settimeout(None)
        lifelines.watch(self._socket)
        self._say(
            Hello(
                token=address.token,
                rank=rank,
                host=socket.gethostname(),
                process=os.getpid(),
            )
        )
        self._thread = threading.Thread(
            target=self._listen, name="paceline liveness", daemon=True
        )
        self._thread.start()

    def _goes_unwatched(self, why: str) -> None:
        self._over = True
        print(
            f"paceline: rank {self._rank} {why}; when a rank dies, it will learn it from "
            "gloo or NCCL alone, and the others will learn its own death from them alone",
            file=sys.stderr,
        )

    def tell_of_training(self, number: int, fault: str) -> None:
        """A training has ended for this rank with a *fault*; the rank itself goes on."""
        if not self._over:
            with contextlib.suppress(OSError):
                brief = fault[:FAULT_CHARACTERS]
                self._say(News(rank=self._rank, fault=brief, training=number))

    def close(self, fault: str | None = None) -> None:
        """This rank ends: well, or with a *fault* that the others are told."""
        if not self._over:
            self._over = True
            with contextlib.suppress(OSError):
                brief = fault[:FAULT_CHARACTERS] if fault else None
                self._say(News(rank=self._rank, fault=brief))
                self._socket.shutdown(socket.SHUT_RDWR)  # the listener closes it
        if self._hub is not None:  # also after bad news
            self._hub.close()
        self._board.close()

    def _say(self, words: msgspec.Struct) -> None:
        self._socket.sendall(_line(words))

    def _listen(self) -> None:
        with self._socket:
            self._hear_news()

    def _hear_news(self) -> None:
        try:
            lines = self._socket.makefile("rb")
            for line in lines:
                news = msgspec.json.decode(line, type=News)
                if news.fault is None:  # rank 0 ends well, and its hub with it
                    return
                sentence = f"rank {news.rank} {news.fault}"
                if news.training is None:
                    self._tell(sentence)
                    return
                if not self._over:
                    self._broke(news.training, sentence)
            lost = None
        except OSError as error:
            lost = error
        except msgspec.MsgspecError as error:
            self._tell(f"rank 0 sent what is not a line of news: {error}")
            return
        self._tell(f"rank 0 {lifelines.how_it_ended(lost)}")

    def _tell(self, sentence: str) -> None:
        if not self._over:
            self._over = True
            self._lost(sentence)


class Hub:
    """Rank 0's side: hears from all ranks, and passes the first bad news on to all."""

    def __init__(self, size: int, meeting: addresses.Meeting, board: Board) -> None:
        self._size = size
        self._token = board.new_token()
        self._listener = socket.create_server(
            (meeting.bind, 0),
            family=addresses.family_of(meeting.bind),
            backlog=min(size, 1024),
        )
        self._listener.setblocking(False)
        self._ranks: dict[socket.socket, Hello] = {}
        self._known: set[socket.socket] = set()  # said hello, and maybe goodbye
        self._pieces: dict[socket.socket, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake, waker = socket.socketpair()
        self._waker = waker
        self._selector.register(waker, selectors.EVENT_READ)
        for end in (self._listener, self._wake, waker):
            lifelines.close_in_children(end)
        port = self._listener.getsockname()[1]
        board.post(_KEY, Address(host=meeting.publish, port=port, token=self._token))
        self._thread = threading.Thread(
            target=self._serve, name="paceline liveness hub", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Rank 0 ends: whoever is still connected is told that this is well."""
        self._wake.close()
        self._thread.join(timeout=GRACE_SECONDS)

    def _serve(self) -> None:
        try:
            self._serve_until_closed()
        finally:
            self._selector.close()
            for connection in (self._listener, self._waker, *self._pieces):
                connection.close()

    def _serve_until_closed(self) -> None:
        closing = False
        while True:
            # Once told to close, hear what has come already: bad news goes first.
            events = self._selector.select(0 if closing else None)
            if closing and not events:
                self._tell_all(News(rank=0))
                return
            for key, _ in events:
                peer: Any = key.fileobj
                if peer is self._waker:
                    self._selector.unregister(peer)
                    closing = True
                elif peer is self._listener:
                    self._accept()
                elif peer in self._pieces:  # not dropped by an event before this one
                    self._read(peer)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            peer, _ = self._listener.accept()
            strangers = [p for p in self._pieces if p not in self._known]
            if (
                len(strangers) >= self._size + 16
            ):  # a crowd: the oldest has had its time
                self._drop(strangers[0])
            peer.setblocking(False)
            lifelines.watch(peer)
            self._pieces[peer] = b""
            self._selector.register(peer, selectors.EVENT_READ)

    def _read(self, peer: socket.socket) -> None:
        try:
            data = peer.recv(LINE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(peer, error)
            return
        if not data:
            self._lose(peer)
            return
        *lines, rest = (self._pieces[peer] + data).split(b"\n")
        self._pieces[peer] = rest
        try:
            if len(rest) > LINE_BYTES:
                raise msgspec.ValidationError("a line without an end")
            for line in lines:
                self._hear(peer, line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self._lose(peer)  # not one of ours, or no longer

    def _hear(self, peer: socket.socket, line: bytes) -> None:
        if peer not in self._ranks:
            hello = msgspec.json.decode(line, type=Hello)
            known = hmac.compare_digest(hello.token.encode(), self._token.encode())
            if not (known and 0 <= hello.rank < self._size):
                raise msgspec.ValidationError("a wrong token")
            self._ranks[peer] = hello
            self._known.add(peer)
            return
        news = msgspec.json.decode(line, type=News)
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
            where = f"(host {hello.host}, process {hello.process})"
            fault = f"{where} {lifelines.how_it_ended(error)}"
            self._tell_all(News(rank=hello.rank, fault=fault))

    def _drop(self, peer: socket.socket) -> None:
        self._selector.unregister(peer)
        self._pieces.pop(peer, None)
        self._known.discard(peer)
        peer.close()

    def _tell_all(self, news: News) -> None:
        for peer in list(self._ranks):
            with contextlib.suppress(OSError):
                peer.send(_line(news))  # fits into an idle connection's buffer


def _make_hub(size: int, board: Board) -> Hub | None:
    try:
        return Hub(size, addresses.at_master(size), board)
    except OSError as error:
        address = os.environ.get("MASTER_ADDR", addresses.LOOPBACK)
        fault = f"rank 0 cannot listen on MASTER_ADDR {address}: {error}"
        board.post(_KEY, Address(fault=fault))
        return None


def end_after_grace(rank: int, sentence: str, said: threading.Event) -> None:
    """What a real worker does with bad news: say it, wait a little, and end."""
    print(f"paceline: {sentence}; rank {rank} ends too", file=sys.stderr, flush=True)
    said.set()
    threading.Event().wait(GRACE_SECONDS)
    os._exit(1)


def _line(words: msgspec.Struct) -> bytes:
    return msgspec.json.encode(words) + b"\n"
