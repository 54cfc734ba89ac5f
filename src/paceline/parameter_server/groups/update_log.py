"""Logs the updates that group servers exchange, and tracks which peer has which.

Each server applies each update once, in the order of its origin, whatever connections and processes
do:

- An entry has a number in its *stream*: all entries of one server, its *origin*, in one
  incarnation.
- A server keeps its own entries until all active peers have acknowledged them.
- A server keeps entries of others until their origin reports that all servers have them. If the
  origin is lost halfway, any server that has an entry sends it to the others.
- A receiver knows by the number whether it has an entry, whichever peer has sent it.

A peer has one `Cursor` for each stream. All cursors of a server are a version vector, which is part
of a state transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from paceline.errors import UsageError
from paceline.interfaces.server_messages import (
    Away,
    BufferUpdate,
    GradientUpdate,
    Rejected,
    ReplyMessage,
    Request,
    Update,
)

Stream = tuple[int, int]
"""A server, and one of its incarnations."""
OnReply = Callable[[ReplyMessage, torch.Tensor | None], None]
"""Receives the reply to a call, and its payload."""
ReplyKind = TypeVar("ReplyKind")


@dataclass(eq=False, frozen=True)
class LogEntry:
    """An update of server *origin*, made after *load* loads and *cut* consistent cuts."""

    origin: int
    incarnation: int
    number: int
    load: int
    cut: int
    update: GradientUpdate | BufferUpdate | Away
    payload: torch.Tensor | None

    @property
    def stream(self) -> Stream:
        return self.origin, self.incarnation


@dataclass
class Cursor:
    """The position of a peer in one stream.

    It has acknowledged the entries below *next*. Those below *stop* must be sent to it; those below
    *sent* are in flight.
    """

    next: int
    sent: int
    stop: int


@dataclass(eq=False)
class Call:
    """A request to a peer other than an update, sent again until the peer replies.

    *then* takes the reply. It raises `UsageError` if this server cannot continue.
    """

    message: Request
    then: OnReply
    into: torch.Tensor | None = None
    is_sent: bool = False


@dataclass(eq=False)
class Peer:
    """Another group server, as far as this server knows.

    Args:
        number: The number of its group.
        name: Its name.
        incarnation: Its incarnation; None before its first message.
        entry: Number of its last entry or departure.
        entered: Number of its last entry that it has requested itself.
        active: Whether updates are sent to it.
        lost: Why its connection was lost, and when; None while it is connected.
        cursors: Its position in each stream.
        calls: Unanswered calls, the oldest first.
        in_flight: Unanswered messages to it, by number of the request.
    """

    number: int
    name: str
    incarnation: int | None = None
    entry: int = 0
    entered: int = -1
    active: bool = True
    lost: tuple[str, float] | None = None
    cursors: dict[Stream, Cursor] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    in_flight: dict[int, LogEntry | Call] = field(default_factory=dict)

    def on_status(self, incarnation: int, entry: int, active: bool) -> None:
        """Store its status, unless it has entered since."""
        if entry > self.entered:
            self.incarnation, self.entry, self.active = incarnation, entry, active

    def unacknowledged(self) -> int:
        """Return the number of entries that it has not acknowledged."""
        return sum(cursor.stop - cursor.next for cursor in self.cursors.values())

    def call(
        self, message: Request, then: OnReply, into: torch.Tensor | None = None
    ) -> Call:
        """Send a request, now or when the peer is back. A payload of the reply is put *into*."""
        call = Call(message, then, into)
        self.calls.append(call)
        return call

    def notify(self, message: Request) -> None:
        """Send a request whose reply is ignored."""
        self.call(message, lambda reply, payload: None)

    def cancel(self, calls: Collection[Call]) -> None:
        """Stop sending these calls, and ignore replies to them."""
        self.calls = [call for call in self.calls if call not in calls]
        self._ignore(lambda one: one in calls)

    def stop_updates(self) -> None:
        """Stop sending updates, and ignore acknowledgements."""
        self.cursors.clear()
        self._ignore(lambda one: isinstance(one, LogEntry))

    def on_lost(self, reason: str, now: float) -> None:
        """Note that its connection was lost."""
        self._send_again()
        if self.lost is None:
            self.lost = reason, now

    def on_back(self) -> None:
        """Note that it is connected again; this server may not have noticed the loss."""
        self._send_again()
        self.lost = None

    def _send_again(self) -> None:
        """Send all messages in flight once more, since no reply to them will come."""
        self.in_flight.clear()
        for cursor in self.cursors.values():
            cursor.sent = cursor.next
        for call in self.calls:
            call.is_sent = False

    def _ignore(self, which: Callable[[LogEntry | Call], bool]) -> None:
        for number in [n for n, one in self.in_flight.items() if which(one)]:
            del self.in_flight[number]


def expect_reply(reply: ReplyMessage, kind: type[ReplyKind], peer: Peer) -> ReplyKind:
    """Return the reply of *peer*, which must be of this kind.

    Raises:
        UsageError: It is of another kind, and this server cannot continue.
    """
    if isinstance(reply, kind):
        return reply
    got = reply.reason if isinstance(reply, Rejected) else f"got {type(reply).__name__}"
    raise UsageError(f"{peer.name}: expected {kind.__name__} as its reply: {got}")


class UpdateLog:
    """The updates of server *number* in this *incarnation*, and those of its *peers*."""

    def __init__(
        self, number: int, incarnation: int, peers: Mapping[int, Peer]
    ) -> None:
        self.stream: Stream = number, incarnation
        """This server's own stream."""
        self._peers = peers
        self._next: dict[Stream, int] = {}
        self._kept: dict[Stream, list[tuple[LogEntry, int]]] = {}
        """Entries that some server may lack, each with the server that sent it."""

    # ---- own entries ----

    def append(
        self,
        update: GradientUpdate | BufferUpdate | Away,
        payload: torch.Tensor | None,
        load: int,
        cut: int,
    ) -> None:
        """Add an update of this server, for all active peers."""
        number = self.next_number(self.stream)
        entry = LogEntry(*self.stream, number, load, cut, update, payload)
        self._next[self.stream] = number + 1
        for peer in self._active():
            start = Cursor(number, number, number)
            peer.cursors.setdefault(self.stream, start).stop = number + 1
        self._kept.setdefault(self.stream, []).append((entry, entry.origin))
        self._trim(self.stream, number + 1)

    def next_number(self, stream: Stream) -> int:
        """Return the number of the next entry of a stream."""
        return self._next.get(stream, 0)

    # ---- progress of peers ----

    def to_send(self, peer: Peer) -> list[LogEntry]:
        """Return the entries to send to a peer now. From now on they count as sent."""
        found = []
        for stream, cursor in peer.cursors.items():
            if cursor.sent < cursor.stop:
                found += [
                    entry
                    for entry, _ in self._kept.get(stream, ())
                    if cursor.sent <= entry.number < cursor.stop
                ]
                cursor.sent = cursor.stop
        return found

    def request(self, entry: LogEntry, peer: Peer) -> Update:
        """Return the request that sends an entry to a peer."""
        return Update(
            source=entry.origin,
            incarnation=entry.incarnation,
            number=entry.number,
            floor=min(entry.number, self._floor(entry.stream)),
            load=entry.load,
            cut=entry.cut,
            entry=peer.entry,
            what=entry.update,
        )

    def _floor(self, stream: Stream) -> int:
        """Return a number below which all active servers have the entries, as far as is known."""
        if stream != self.stream:
            kept = self._kept.get(stream)
            return kept[0][0].number if kept else self.next_number(stream)
        cursors = [peer.cursors.get(stream) for peer in self._active()]
        return min(
            (c.next for c in cursors if c is not None),
            default=self.next_number(stream),
        )

    def acknowledged(self, peer: Peer, entry: LogEntry) -> None:
        """Note that a peer has this entry, and all before it in its stream."""
        self._advance(peer, entry.stream, entry.number + 1)
        self._trim(entry.stream, entry.number + 1)

    def _advance(self, peer: Peer, stream: Stream, number: int) -> None:
        """Note that a peer has all entries of a stream below *number*."""
        cursor = peer.cursors.get(stream)
        if cursor is None or number <= cursor.next:
            return
        cursor.next = number
        cursor.sent = max(cursor.sent, number)
        if stream != self.stream and number >= cursor.stop:
            del peer.cursors[stream]

    def _trim(self, stream: Stream, number: int) -> None:
        """Drop the entries below *number* that all peers have acknowledged."""
        cursors = [peer.cursors.get(stream) for peer in self._peers.values()]
        least = min([number, *(c.next for c in cursors if c is not None)])
        kept = self._kept.get(stream, [])
        self._kept[stream] = [one for one in kept if one[0].number >= least]

    def all_acknowledged(self) -> bool:
        """Return whether all active peers have acknowledged all entries for them."""
        return not self.most_unacknowledged()

    def most_unacknowledged(self) -> int:
        """Return the most entries that an active peer has not acknowledged."""
        return max((peer.unacknowledged() for peer in self._active()), default=0)

    # ---- entries of other servers ----

    def is_new(self, stream: Stream, number: int) -> bool:
        """Return whether this server still has to apply an entry.

        Raises:
            UsageError: An entry before it is missing.
        """
        expected = self.next_number(stream)
        if stream == self.stream or number < expected:
            return False
        if number > expected:
            raise UsageError(
                f"update: expected number {expected} of server {stream[0]}, got {number}"
            )
        return True

    def receive(self, entry: LogEntry, sender: int, floor: int) -> None:
        """Store a new entry that was applied.

        All servers have the entries of its stream below *floor*.
        """
        self._next[entry.stream] = entry.number + 1
        self._kept.setdefault(entry.stream, []).append((entry, sender))
        for peer in self._peers.values():
            self._advance(peer, entry.stream, floor)
        self._trim(entry.stream, floor)

    def on_peer_lost(self, lost: int) -> None:
        """Forward the entries of a lost server, since the others may lack them."""
        for stream, kept in self._kept.items():
            numbers = [
                entry.number
                for entry, sender in kept
                if stream != self.stream and lost in (sender, entry.origin)
            ]
            if not numbers:
                continue
            first, stop = numbers[0], numbers[-1] + 1
            for peer in self._active():
                if peer.number != lost:
                    start = Cursor(first, first, stop)
                    cursor = peer.cursors.setdefault(stream, start)
                    cursor.stop = max(cursor.stop, stop)

    # ---- active peers ----

    def stop_sending(self, peer: Peer) -> None:
        """Stop sending updates to this peer."""
        peer.active = False
        peer.stop_updates()
        self._trim(self.stream, self.next_number(self.stream))

    def retain_for(self, peer: Peer, entry: int, via: Peer | None) -> int:
        """Send an entering peer the entries that *via* lacks, and all entries from now on.

        Args:
            peer: The peer. It adopts the state of *via*.
            entry: The number of its entry.
            via: Another peer; None: this server, whose state lacks nothing.

        Returns:
            The number of the first own entry that is sent to it.
        """
        cursors = {} if via is None or via is peer else via.cursors
        copied = {stream: replace(c, sent=c.next) for stream, c in cursors.items()}
        self.stop_sending(peer)
        number = self.next_number(self.stream)
        peer.active, peer.entry, peer.entered = True, entry, entry
        peer.cursors = {self.stream: Cursor(number, number, number), **copied}
        return peer.cursors[self.stream].next

    def _active(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.active]

    # ---- for a state transfer ----

    def vector(self) -> list[tuple[int, int, int]]:
        """Return, by origin and incarnation, the number of the next entry."""
        vector = {self.stream: 0, **self._next}
        return [(*stream, number) for stream, number in vector.items()]

    def restore(self, vector: Iterable[tuple[int, int, int]]) -> None:
        """Continue with the `vector` of another server, whose state was adopted."""
        own = self.next_number(self.stream)
        self._next = {(origin, incarnation): n for origin, incarnation, n in vector}
        self._next[self.stream] = own
        for stream, kept in self._kept.items():
            if kept and stream != self.stream:
                self._trim(stream, kept[-1][0].number + 1)

    def skip(self, stream: Stream, number: int) -> None:
        """Skip entries below this number, which will not arrive."""
        self._next[stream] = max(number, self.next_number(stream))
