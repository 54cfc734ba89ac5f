"""Connects ranks to their aggregators, servers and each other: `Joining.join` returns a `Session`.

1. Each rank opens its own listener or server, and sends its address to all.
2. Each rank registers where its chunks go to and where chunks come from.
3. A first small sum tests all connections.

After each step all ranks exchange whether it succeeded. If one rank reports a fault, all raise it,
and none waits for another.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from paceline.collectives.in_network.server import (
    STRANGERS,
    AggregatorServer,
    ServerThread,
)
from paceline.collectives.in_network.session import (
    CHUNK_BYTES,
    WINDOW,
    Peer,
    Place,
    Session,
)
from paceline.collectives.in_network.stages import FEWEST_BYTES, PIECES
from paceline.collectives.in_network.sums_service import ServerHosts
from paceline.collectives.in_network.topology import (
    AtpTree,
    End,
    Group,
    at_worker,
    next_of,
)
from paceline.collectives.in_network.wire import (
    MOST_TEXT_BYTES,
    Address,
    Connection,
    Granted,
    Hello,
    Kind,
    Parent,
    ProtocolError,
    Registration,
    Terms,
    decode_json,
    is_proven,
    proof_of,
    text_frame,
)
from paceline.errors import PeerLostError, UsageError
from paceline.timeouts import timeouts

Exchange = Callable[[bytes], Sequence[bytes]]
"""Collective: sends this rank's message and returns every rank's, in rank order. Raises the
transport's errors."""


@dataclass(frozen=True)
class JobConfig:
    """What one rank knows of a job.

    *aggregators*: the address of each rack's aggregator. *name*: unique to the job. *token*: the
    aggregators' secret token.
    """

    rank: int
    aggregators: Mapping[int, Address]
    name: str
    token: str


class Card(msgspec.Struct):
    """The state that a rank sends to all others when a group forms.

    *fault* says why it cannot take part, and *lost* whether the reason is a lost peer. The next
    group connects to the address *listens*, and proves itself with *nonce*. *servers* are addresses
    by part. *chunk_bytes* is what the rank was granted.
    """

    fault: str = ""
    lost: bool = False
    listens: Address = ("", 0)
    nonce: str = ""
    servers: dict[int, Address] = {}
    chunk_bytes: int = CHUNK_BYTES


class Joining(ABC):
    """One rank's way into a job. *_opened* holds open connections and listeners until the session
    owns them."""

    def __init__(self, job: JobConfig) -> None:
        self._job = job
        self._name = f"rank {job.rank}"
        self._opened: list[
            Registration | Connection | socket.socket | ServerThread
        ] = []

    def join(self, exchange: Exchange) -> Session:
        """Connect, and return the session. Collective.

        Raises, on all ranks alike, `UsageError` if a rank or aggregator refuses, and
        `PeerLostError` if one cannot be reached.
        """
        sessions: list[Session] = []

        def finish() -> Card:
            sessions.append(self._finish(cards))
            try:
                self._try_ways(sessions[0])
            except BaseException:
                sessions[0].close(well=False)  # the closed connections tell the others
                raise
            return Card()

        try:
            cards = self._exchange_cards(exchange, self._attempt(self._open))
            cards = self._exchange_cards(
                exchange, self._attempt(lambda: self._register(cards))
            )
            self._exchange_cards(exchange, self._attempt(finish))
        except BaseException:
            for session in sessions:
                session.close(well=False)
            self._close()
            raise
        return sessions[0]

    @abstractmethod
    def _open(self) -> Card:
        """Open the listeners or servers for which this rank needs no other process."""

    @abstractmethod
    def _register(self, cards: Sequence[Card]) -> Card:
        """Register with the aggregators and peers that *cards* name, by rank."""

    @abstractmethod
    def _finish(self, cards: Sequence[Card]) -> Session:
        """Make the session; all ranks have registered."""

    @property
    @abstractmethod
    def _most_ways(self) -> int:
        """The most connections that take turns at the chunks of one part."""

    @property
    def _parts(self) -> int:
        """Parts of a sum: one for each group of a ring."""
        return 1

    def _attempt(self, step: Callable[[], Card]) -> Card:
        """The card that *step* returns, or a card with its error."""
        try:
            return step()
        except (UsageError, PeerLostError, OSError) as error:
            self._close()
            lost = not isinstance(error, UsageError)
            return Card(fault=str(error) or type(error).__name__, lost=lost)

    def _exchange_cards(self, exchange: Exchange, card: Card) -> list[Card]:
        """Exchange cards; raise the fault of any rank."""
        encoded = exchange(msgspec.json.encode(card))
        cards = [msgspec.json.decode(one, type=Card) for one in encoded]
        faults = [other for other in cards if other.fault]
        for other in sorted(faults, key=lambda other: other.lost):  # causes first
            raise (PeerLostError if other.lost else UsageError)(other.fault)
        return cards

    def _try_ways(self, session: Session) -> None:
        """Test each agent and each server with small sums. Raises `UsageError` if one does not get
        through."""
        ways = self._most_ways
        for first in range(0, ways, PIECES):
            chunks = min(PIECES, ways - first)
            values = np.ones(self._parts * chunks * FEWEST_BYTES // 4, np.int32)
            session.all_reduce(values, seconds=timeouts.aggregator_probe)

    def _close(self) -> None:
        for one in self._opened:
            with contextlib.suppress(OSError):
                one.close()
        self._opened.clear()

    def _registration(
        self, address: Address, name: str, nonce: str | None = None
    ) -> Registration:
        one = Registration(address, self._job.token, name, nonce)
        self._opened.append(one)
        return one


class JoinRing(Joining):
    """Joins the ring of *groups*.

    All workers of a rack with an aggregator are one group; every other worker is a group by itself.
    """

    def __init__(self, groups: Sequence[Group], job: JobConfig) -> None:
        super().__init__(job)
        self._groups = groups
        self._at = next(i for i, g in enumerate(groups) if job.rank in g.ranks)
        self._group, self._before = groups[self._at], groups[self._at - 1]
        self._is_alone = self._group.rack is None
        self._listener: socket.socket | None = None
        self._nonce = ""
        self._to_before: Registration | None = None
        self._peers: list[Peer] = []
        self._peer_before: Peer | None = None
        self._window = WINDOW
        self._number = self._group.ranks.index(job.rank)

    @property
    def _most_ways(self) -> int:
        return max(len(group.ranks) for group in self._groups)

    @property
    def _parts(self) -> int:
        return len(self._groups)

    def _terms(self, at: int) -> Terms:
        """The terms of group *at*."""
        group = self._groups[at]
        behind = self._groups[(at + 1) % len(self._groups)]
        return Terms(
            job=f"{self._job.name} group {at}",
            expected=(len(group.ranks),),
            window=WINDOW,
            chunk_bytes=CHUNK_BYTES,
            agents=len(behind.ranks) if len(self._groups) > 1 else 0,
        )

    def _open(self) -> Card:
        if not self._is_alone:
            return Card()
        host = own_host(next(iter(self._job.aggregators.values())))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self._opened.append(self._listener)
        self._nonce = secrets.token_hex(16)
        return Card(listens=self._listener.getsockname()[:2], nonce=self._nonce)

    def _register(self, cards: Sequence[Card]) -> Card:
        job, card = self._job, Card()
        if self._group.rack is not None:
            at = self._registration(job.aggregators[self._group.rack], "the aggregator")
            at.send_hello("worker", self._number, self._name, self._terms(self._at))
            connection, granted = at.granted()
            self._opened.append(connection)
            self._peers = [Peer(connection, at.name)]
            self._window, card.chunk_bytes = granted.window, granted.chunk_bytes
        if len(self._groups) == 1:
            return card
        terms = self._terms((self._at - 1) % len(self._groups))
        if self._before.rack is not None:
            at = self._registration(
                job.aggregators[self._before.rack], "the aggregator before"
            )
            at.send_hello("agent", self._number, self._name, terms)
            self._take_before(at)
        else:
            first = cards[self._before.ranks[0]]
            name = f"rank {self._before.ranks[0]}"
            at = self._registration(first.listens, name, first.nonce)
            at.send_hello("agent", self._number, self._name, terms)
            self._to_before = at  # it answers once all have registered
        return card

    def _take_before(self, at: Registration) -> None:
        connection, _ = at.granted()
        self._opened.append(connection)
        self._peer_before = Peer(connection, at.name)

    def _finish(self, cards: Sequence[Card]) -> Session:
        if self._listener is not None:
            self._peers = self._welcome_agents(self._listener)
            self._listener.close()
        if self._to_before is not None:
            self._take_before(self._to_before)
        self._opened.clear()
        place = Place(
            groups=len(self._groups),
            position=self._at,
            alone=self._is_alone,
            alone_before=self._before.rack is None,
            agent=(self._number, len(self._group.ranks)),
        )
        chunk_bytes = min(card.chunk_bytes for card in cards)
        return Session(place, self._peers, self._peer_before, self._window, chunk_bytes)

    def _welcome_agents(self, listener: socket.socket) -> list[Peer]:
        """Accept the next group's workers; return them in their order.

        All have said hello already. Connections without the token are closed.
        """
        terms = self._terms(self._at)
        found: dict[int, Peer] = {}
        behind = self._groups[(self._at + 1) % len(self._groups)]
        seconds = timeouts.aggregator_connect
        with contextlib.closing(_hellos_at(listener, seconds)) as hellos:
            while len(found) < terms.agents:
                arrived = next(hellos, None)
                if arrived is None:
                    missing = sorted(set(range(terms.agents)) - set(found))
                    ranks = [behind.ranks[number] for number in missing]
                    raise PeerLostError(
                        f"rank {self._job.rank}: ranks {ranks}, the next group of the ring, have "
                        f"not connected within {seconds:g} s"
                    )
                connection, hello = arrived
                if not is_proven(self._job.token, self._nonce, hello):
                    connection.close()
                    continue
                self._opened.append(connection)
                if hello.terms != terms or hello.number in found:
                    raise UsageError(
                        f"rank {self._job.rank}: {hello.role} {hello.number} asks for "
                        f"{hello.terms}: expected {terms}, once"
                    )
                granted = Granted(window=WINDOW, chunk_bytes=CHUNK_BYTES)
                granted.proof = proof_of(self._job.token, hello.nonce, granted)
                connection.put(text_frame(Kind.GRANTED, granted))
                connection.flush()
                name = f"rank {behind.ranks[hello.number]}"
                found[hello.number] = Peer(connection, name)
        return [found[number] for number in range(terms.agents)]


class JoinTree(Joining):
    """Joins the sums of servers behind switches; see `topology`.

    *hosts*: the dedicated servers, if there are some. Other servers are threads of workers'
    processes.
    """

    def __init__(
        self, tree: AtpTree, hosts: ServerHosts | None, job: JobConfig
    ) -> None:
        super().__init__(job)
        self._tree, self._hosts = tree, hosts
        self._ways: list[Peer] = []
        self._thread: ServerThread | None = None
        self._servers: dict[int, Address] = {}

    def _open(self) -> Card:
        job, found = self._job, {}
        mine = [p for p, s in enumerate(self._tree.servers) if s.rank == job.rank]
        if mine:
            near = job.aggregators.get(self._tree.racks[job.rank])
            near = near or next(iter(job.aggregators.values()))
            server = AggregatorServer(own_host(near), 0, token=job.token)
            self._thread = ServerThread(server)
            self._opened.append(self._thread)
            found = dict.fromkeys(mine, server.address)
        if self._hosts is not None and job.rank == 0:
            found |= dict(enumerate(self._hosts.open(job.token)))
        return Card(servers=found)

    def _register(self, cards: Sequence[Card]) -> Card:
        for card in cards:
            self._servers |= card.servers
        ends = at_worker(self._tree, self._job.rank)
        peers: dict[End, Peer] = {}
        for end in dict.fromkeys(ends):
            name = f"the aggregator of rack {end.number}"
            if end.kind == "server":
                name = f"the server of part {end.number}"
            at = self._registration(self._address(end), name)
            at.send_hello(
                "worker",
                self._job.rank,
                self._name,
                self._terms(end),
                self._parents(end),
            )
            connection, _ = at.granted()
            self._opened.append(connection)
            peers[end] = Peer(connection, at.name)
        self._ways = [peers[end] for end in ends]
        return Card()

    def _finish(self, cards: Sequence[Card]) -> Session:
        self._opened.clear()
        return Session(
            Place(), self._ways, None, WINDOW, CHUNK_BYTES, server=self._thread
        )

    @property
    def _most_ways(self) -> int:
        return len(self._tree.servers)

    def _address(self, end: End) -> Address:
        """The numeric address of *end*: an aggregator resolves no names."""
        if end.kind == "server":
            return self._servers[end.number]
        return numeric(self._job.aggregators[end.number])

    def _terms(self, end: End) -> Terms:
        """The terms that all workers send to *end*."""
        expected, nexts = next_of(self._tree, end)
        parents = _without_repeats(nexts)
        return Terms(
            job=f"{self._job.name} {end.kind} {end.number}",
            expected=expected,
            window=WINDOW,
            chunk_bytes=CHUNK_BYTES,
            leased=not parents,
            parent_of=tuple(-1 if one is None else parents.index(one) for one in nexts),
        )

    def _parents(self, end: End) -> tuple[Parent, ...]:
        """The parents to which *end* sends its sums."""
        _, nexts = next_of(self._tree, end)
        return tuple(
            Parent(*self._address(one), end.number, self._terms(one))
            for one in _without_repeats(nexts)
        )


def _without_repeats(ends: Sequence[End | None]) -> list[End]:
    return list(dict.fromkeys(end for end in ends if end is not None))


def _hellos_at(
    listener: socket.socket, seconds: float
) -> Generator[tuple[Connection, Hello], None, None]:
    """The connections that say hello within *seconds*; the caller closes these.

    All connections are read at the same time, so one that sends nothing delays no other.
    """
    end = time.monotonic() + seconds
    begun: dict[Connection, bytearray | None] = {}
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while (left := end - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    connection: Connection | None = key.data
                    if connection is None:
                        connection = _accepted(listener)
                        if connection is None:
                            continue
                        if len(begun) >= STRANGERS:
                            oldest = next(iter(begun))
                            _forget(oldest, begun, selector)
                        begun[connection] = None
                        selector.register(connection, selectors.EVENT_READ, connection)
                    elif connection not in begun:
                        continue  # an earlier event has closed it
                    try:
                        hello = _read_hello(connection, begun)
                    except (OSError, EOFError, ProtocolError):
                        _forget(connection, begun, selector)
                        continue
                    if hello is not None:
                        del begun[connection]
                        selector.unregister(connection)
                        yield connection, hello
        finally:
            for connection in begun:
                connection.close()


def _accepted(listener: socket.socket) -> Connection | None:
    """The next connection; None if it has gone again."""
    try:
        return Connection(listener.accept()[0])
    except OSError:
        return None


def _forget(
    connection: Connection,
    begun: dict[Connection, bytearray | None],
    selector: selectors.BaseSelector,
) -> None:
    del begun[connection]
    selector.unregister(connection)
    connection.close()


def _read_hello(
    connection: Connection, begun: dict[Connection, bytearray | None]
) -> Hello | None:
    """The hello of a connection; None if it has not arrived yet.

    *begun*: by connection, the payload that is being read. Raises `EOFError`, `OSError` and
    `ProtocolError`.
    """
    header = connection.read_header(MOST_TEXT_BYTES)
    if header is None:
        return None
    if header.kind != Kind.HELLO:
        raise ProtocolError(f"a frame of kind {header.kind}: expected a hello")
    payload = begun[connection]
    if payload is None:
        payload = begun[connection] = bytearray(header.size)
    if not connection.read_payload(memoryview(payload), MOST_TEXT_BYTES):
        return None
    return decode_json(payload, Hello)


def own_host(address: Address) -> str:
    """This machine's own address on the route to *address*."""
    found = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
    with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
        probe.connect(found[4])  # sends nothing: only finds the way
        return str(probe.getsockname()[0])


def numeric(address: Address) -> Address:
    """The numeric form of *address*, for other processes. Raises `OSError` if it is not found."""
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][4]
    return str(found[0]), int(found[1])
