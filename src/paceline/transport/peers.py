"""A service's ends of the other services that it asks, its peers, in the loop of its `Shell`.

Theory of operation
-------------------
A service learns where its peers are once all of its job's listen (`Peers.meet`). Connecting
may take a while, and two services may connect to each other: so each connection is made on a
thread of its own, while the loop serves. A thread hands over what it has made, and a byte in a
pipe wakes the loop. From then on the `PollLoop` read the connection.

What is asked before that is kept. A peer that is lost, or was never reached, is told to the
machine at once, and again when the machine asks it once more: nothing waits for it. Where peers may
come back (`ReturningServer`), a thread tries to reach it until it is there: each time as a
later incarnation, since who was here before is not let in.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from paceline.errors import PacelineError, UsageError
from paceline.interfaces import Answer, Ask, AskingServer, ReturningServer
from paceline.interfaces.server_messages import Reply
from paceline.timeouts import timeouts
from paceline.transport.connection import RemoteServer, check_listens
from paceline.transport.poll_loop import PollLoop


def no_peer(asker: str, peer: str, peers: Iterable[str]) -> str:
    """What a service is told that asks one which is no peer of its."""
    return (
        f"{asker} asks {peer!r}, which is no peer of its: expected one of "
        f"{', '.join(peers) or 'none'}"
    )


ATTEMPTS_A_LIFE = 1 << 20


class PeerAddress(msgspec.Struct, kw_only=True):
    """Where a peer listens, and the token that it asks for."""

    host: str
    port: int
    token: str


@dataclass
class _Way:
    """How to reach a peer: as number *sender*, next time as *incarnation*."""

    sender: int
    address: PeerAddress
    incarnation: int


@dataclass
class _Peer:
    """*end* is None until the connection stands, and what is asked meanwhile *waiting*;
    *lost*: why there is nobody; *way*: None until it is known."""

    end: RemoteServer | None = None
    waiting: list[Ask] = field(default_factory=list)
    lost: str = ""
    way: _Way | None = None


class Peers:
    """What *machine* asks, and whom of these *names*. All but `meet` is called by *loop*."""

    def __init__(
        self,
        machine: AskingServer,
        names: Iterable[str],
        loop: PollLoop,
        now: Callable[[], float],
    ) -> None:
        self._machine, self._loop, self._now = machine, loop, now
        self._peers = {name: _Peer() for name in names}
        self._made: queue.SimpleQueue[tuple[str, RemoteServer | PacelineError]] = (
            queue.SimpleQueue()
        )
        self._replies: list[tuple[str, int, Reply, Ask]] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._awake, self._wake = os.pipe()
        loop.watch(self._awake, self._wake_up)

    def meet(
        self, sender: int, addresses: Mapping[str, PeerAddress], life: int = 0
    ) -> None:
        """Connect to them all, as number *sender* in its so-manieth *life*; returns at once."""
        for name, address in addresses.items():
            # One that was there before its job learns names, too.
            peer = self._peers.setdefault(name, _Peer())
            peer.way = _Way(sender, address, life * ATTEMPTS_A_LIFE)
            self._set_out(name, peer.way, again=False)

    def _wake_up(self) -> None:
        os.read(self._awake, 4096)

    def ask(self, ask: Ask) -> Sequence[Answer | Ask]:
        """Send a request; returns what the machine says if nobody is there any more. Raises
        `UsageError` for one who is no peer."""
        peer = self._peers.get(ask.peer)
        if peer is None:
            raise UsageError(no_peer("a service", ask.peer, self._peers))
        if peer.lost:
            return self._machine.on_peer_lost(ask.peer, peer.lost, self._now())
        if peer.end is None:
            peer.waiting.append(ask)
        else:
            self._send(peer.end, ask)
        return ()

    def collect(self) -> list[Answer | Ask]:
        """What the machine says to all that has come in, and to who was lost."""
        said: list[Answer | Ask] = []
        while not self._made.empty():
            said += self._take(*self._made.get())
        replies, self._replies = self._replies, []
        for name, number, reply, ask in replies:
            said += self._machine.on_reply(name, number, reply, ask.into, self._now())
        for name, peer in self._peers.items():
            if peer.end is not None and peer.end.failure is not None:
                said += self._lose(name, peer, str(peer.end.failure))
        return said

    def close(self, well: bool) -> None:
        """Let go of them; *well*: with a goodbye, so that nobody takes this for a loss."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            self._loop.unwatch(self._awake)
            os.close(self._awake)
            os.close(self._wake)
        while not self._made.empty():
            _, made = self._made.get()
            if isinstance(made, RemoteServer):
                made.part(well)
        for peer in self._peers.values():
            if peer.end is not None:
                peer.end.part(well)

    def _set_out(self, name: str, way: _Way, again: bool) -> None:
        threading.Thread(
            target=self._connect, args=(name, way, again), daemon=True
        ).start()

    def _connect(self, name: str, way: _Way, again: bool) -> None:
        """On a thread of its own, one for each peer; *again*: until it is there."""
        pause = timeouts.peer_retry
        if again and self._closed.wait(pause):
            return
        made = _reached(name, way)
        while again and not isinstance(made, RemoteServer):
            pause = min(2 * pause, timeouts.peer_retry_at_most)
            if self._closed.wait(pause):
                return
            made = _reached(name, way)
        with self._lock:
            if not self._closed.is_set():
                self._made.put((name, made))
                os.write(self._wake, b"\n")
                return
        if isinstance(made, RemoteServer):
            made.part(well=True)

    def _take(
        self, name: str, made: RemoteServer | PacelineError
    ) -> Sequence[Answer | Ask]:
        peer = self._peers[name]
        if isinstance(made, PacelineError):
            return self._lose(name, peer, str(made))
        peer.end = made
        made.read_in(self._loop)
        waiting, peer.waiting = peer.waiting, []
        for ask in waiting:
            self._send(made, ask)
        if not peer.lost:
            return ()
        peer.lost = ""
        assert isinstance(self._machine, ReturningServer), "others stay lost"
        return self._machine.on_peer_back(name, self._now())

    def _send(self, end: RemoteServer, ask: Ask) -> None:
        def replied(reply: Reply) -> None:
            self._replies.append((ask.peer, ask.number, reply, ask))

        try:
            end.ask(ask.message, ask.payload, ask.into, ask.channel, replied)
        except PacelineError:
            # A peer that is gone by now, or refuses this service, is found so by `collect`.
            if end.failure is None:
                raise

    def _lose(self, name: str, peer: _Peer, reason: str) -> Sequence[Answer | Ask]:
        if peer.end is not None:
            peer.end.part(well=False)
        peer.end, peer.lost = None, reason
        peer.waiting.clear()
        if peer.way is not None and isinstance(self._machine, ReturningServer):
            self._set_out(name, peer.way, again=True)
        return self._machine.on_peer_lost(name, reason, self._now())


def _reached(name: str, way: _Way) -> RemoteServer | PacelineError:
    """The peer's end; or why there is none."""
    host, port = way.address.host, way.address.port
    try:
        check_listens(name, host, port)
        return RemoteServer(
            name,
            host,
            port,
            worker=way.sender,
            incarnation=way.incarnation,
            token=way.address.token,
        )
    except PacelineError as error:
        return error
    finally:
        way.incarnation += 1
