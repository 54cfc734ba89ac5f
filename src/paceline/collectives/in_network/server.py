"""The aggregator in user space: `Jobs` behind a UDP socket and a TCP port of the same number.

One thread, one loop. Datagrams are taken and sent in batches (see `datagrams`), each batch is
dealt with as arrays, and nothing here has a timer: who misses an answer asks again. Answers go to
the addresses that were registered, never to where a datagram claims to be from, so nobody can
be flooded by way of an aggregator.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from paceline.collectives.in_network.datagrams import (
    Addresses,
    held_datagrams,
    open_socket,
)
from paceline.collectives.in_network.jobs import Job, Jobs
from paceline.collectives.in_network.packets import (
    IP6_BYTES,
    IP_BYTES,
    MOST_WORKERS,
    Array,
    elements_for,
)
from paceline.collectives.in_network.registration import (
    LINE_BYTES,
    VERSION,
    Challenge,
    Ended,
    Goodbye,
    Granted,
    Refused,
    Register,
    check_may_be_read,
    from_worker,
    is_proven,
    line_of,
    proof_of,
)
from paceline.collectives.in_network.slots import EVERYONE, NEXT, Outgoing
from paceline.collectives.in_network.udp_socket import datagrams
from paceline.errors import UsageError
from paceline.transport import liveness
from paceline.transport.poll_loop import PollLoop

SLOTS = 1024
"""Of 1432 values twice: 3 MB."""
PLACES = 1024
"""That jobs without a lease compete for."""
MTU = 1500
BATCHES = 8
"""Of datagrams, before a control connection is looked at again."""
STRANGERS = 64
"""Control connections that have not registered."""
_TRIES = 16
"""To find a port that is free for both protocols."""


@dataclass
class _Caller:
    """A control connection: *nonce* of its challenge; later its job and worker."""

    nonce: str
    job: Job | None = None
    worker: int = -1


@dataclass
class _Ways:
    """Where a job's datagrams go: rows of its *table*. *workers*: by worker; some share a way.
    *expected*: see `Terms`."""

    expected: Array
    table: Addresses = field(default_factory=Addresses)
    workers: dict[int, int] = field(default_factory=dict)
    next: list[int] = field(default_factory=list)
    _shared: list[Array] = field(default_factory=list)

    def lead(
        self, words: Register, own: tuple[str, int], others: Sequence[tuple[str, int]]
    ) -> None:
        """One more worker is here: its *own* address, and the *others* that it names, those
        behind and then those of routes."""
        self.workers[words.worker] = self.table.add(own)
        if words.next:
            self.next = [self.table.add(one) for one in others[: len(words.next)]]
        for (bits, _, _), address in zip(
            words.routes, others[len(words.next) :], strict=True
        ):
            place = self.table.add(address)
            for worker in range(bits.bit_length()):
                if bits >> worker & 1:
                    self.workers[worker] = place
        self._shared.clear()

    def shared(self, turn: int) -> Array:
        """The ways to all whose contributions to slots of that turn come through here."""
        if not self._shared:
            self._shared = [
                np.unique([p for w, p in self.workers.items() if bits >> w & 1])
                for bits in self.expected.tolist()
            ]
        return self._shared[turn]


class UserSpaceAggregator:
    """The shell. *port* 0: a free one."""

    def __init__(
        self,
        address: str,
        port: int,
        *,
        token: str,
        slots: int = SLOTS,
        places: int = PLACES,
        mtu: int = MTU,
    ) -> None:
        """Raises `UsageError` where it cannot listen, or may not."""
        check_may_be_read(address)
        if not token:
            raise UsageError(
                "token: expected the aggregator's secret token, got nothing"
            )
        for name, number in (("slots", slots), ("best-effort places", places)):
            if not 1 <= number <= 1 << 20:
                raise UsageError(f"{name}: expected 1 to {1 << 20}, got {number}")
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        ip_bytes = IP6_BYTES if family == socket.AF_INET6 else IP_BYTES
        elements = elements_for(mtu, ip_bytes=ip_bytes)
        self._listener, self._udp = _listen(address, port, family)
        self.port = int(self._listener.getsockname()[1])
        self._datagrams = datagrams(self._udp, elements)
        room = held_datagrams(self._udp, elements)
        self.jobs = Jobs(slots, places, elements, token, most_slots=room)
        self.counts: Counter[str] = self.jobs.counts
        self._token = token
        self._callers = liveness.Callers(STRANGERS, LINE_BYTES)
        self._known: dict[socket.socket, _Caller] = {}
        self._ways: dict[int, _Ways] = {}
        self._loop = PollLoop()
        self._loop.watch(self._udp, self._read_datagrams)
        self._loop.watch(self._listener, self._accept)
        self._stopped = False
        for end in (self._listener, self._udp):
            liveness.close_in_children(end)

    # ---- the loop ----

    def run(
        self,
        stop: socket.socket | int | None = None,
        every: float | None = None,
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve until *stop* can be read; call *tell* about *every* so many seconds."""
        if stop is not None:
            self._loop.watch(stop, self._stop)
        patience = None if every is None else int(1000 * every)
        while not self._stopped:
            self._loop.handle(patience)
            tell()

    def close(self) -> None:
        """Close all sockets; jobs learn of it by their connections."""
        self._loop.let_go()
        self._callers.close_all()
        self._listener.close()
        self._udp.close()

    def _stop(self) -> None:
        self._stopped = True

    def summary(self) -> dict[str, int]:
        """All counts, by word."""
        total = Counter(self.counts)
        total["collisions"] = self.jobs.best_effort.collisions
        for word, count in self.jobs.all_dropped().items():
            total[f"dropped: {word}"] += count
        for word, count in self._datagrams.counts.items():
            total[word] += count
        return dict(total)

    # ---- datagrams ----

    def _read_datagrams(self) -> None:
        for _ in range(BATCHES):
            packets, lengths = self._datagrams.receive()
            if not len(packets):
                return
            self.counts["datagrams in"] += len(packets)
            self.counts["bytes in"] += int(np.maximum(lengths, 0).sum())
            for job, out in self.jobs.take(packets, lengths):
                self._send(job, out)

    def _send(self, job: Job, out: Outgoing) -> None:
        if not len(out.to):
            return
        ways = self._ways[job.number]
        rows, places = _destinations(out, ways)
        known = places >= 0
        if not known.all():
            self.counts["dropped: for nobody"] += int(np.count_nonzero(~known))
            rows, places = rows[known], places[known]
        self.counts["sums out"] += len(out.to)
        self.counts["datagrams out"] += len(rows)
        self._datagrams.send(out.packets, rows, ways.table, places)

    # ---- control connections ----

    def _accept(self) -> None:
        peer = self._callers.accept(self._listener, self._drop)
        if peer is not None:
            caller = self._known[peer] = _Caller(secrets.token_hex(16))
            self._loop.watch(peer, partial(self._read, peer))
            self._say(peer, Challenge(version=VERSION, nonce=caller.nonce))

    def _read(self, peer: socket.socket) -> None:
        said = self._callers.read(peer)
        for line in said.lines:
            if peer not in self._callers:
                return
            self._hear(peer, line)
        if said.over and peer in self._callers:
            self._lose(peer, liveness.how_it_ended(said.error))

    def _hear(self, peer: socket.socket, line: bytes) -> None:
        caller = self._known[peer]
        try:
            words = from_worker(line)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self.counts["refused: undecodable"] += 1
            self._lose(peer, "said what is none of a worker's words")
            return
        if isinstance(words, Goodbye):
            if caller.job is not None and self.jobs.depart(caller.job, caller.worker):
                self._ways.pop(caller.job.number, None)
            self._drop(peer)
            return
        if caller.job is not None:
            self._lose(peer, "registered twice on one connection")
            return
        self._register(peer, caller, words)

    def _register(self, peer: socket.socket, caller: _Caller, words: Register) -> None:
        if not is_proven(self._token, caller.nonce, words):
            self._refuse(peer, "it expects another token than the worker's")
            return
        try:
            words.terms().check()
            own = words.host or str(peer.getpeername()[0]), words.port
            named = [*words.next, *(way[1:] for way in words.routes)]
            if len(named) > 2 * MOST_WORKERS:
                raise UsageError(
                    f"{len(named)} addresses behind: expected fewer than workers"
                )
            if any(not 0 <= way[0] < 1 << words.workers for way in words.routes):
                raise UsageError("routes: expected bits of the job's workers")
            plain = [(_plain(host), _port(port)) for host, port in (own, *named)]
            job = self.jobs.register(words.terms(), words.worker)
        except (ValueError, OSError) as error:  # UsageError is one of the former
            self._refuse(peer, str(error))
            return
        ways = self._ways.setdefault(job.number, _Ways(job.expected))
        ways.lead(words, plain[0], plain[1:])
        caller.job, caller.worker = job, words.worker
        self._callers.know(peer)
        slots = len(job.lease) or job.terms.slots
        granted = Granted(number=job.number, slots=slots, capacity=self.jobs.elements)
        granted.proof = proof_of(self._token, words.nonce, granted)
        self._say(peer, granted)

    def _refuse(self, peer: socket.socket, reason: str) -> None:
        self.counts["refused: registrations"] += 1
        self._say(peer, Refused(reason=reason[: LINE_BYTES // 2]))
        self._drop(peer)

    def _lose(self, peer: socket.socket, why: str) -> None:
        """A connection ended without a goodbye: its job, if any, is over for all."""
        caller = self._known[peer]
        self._drop(peer)
        if caller.job is None:
            return
        job = caller.job
        reason = f"worker {caller.worker} {why}, so its job is over"
        for other, known in list(self._known.items()):
            if known.job is job:
                self._say(other, Ended(reason=reason))
                self._drop(other)
        self._ways.pop(job.number, None)
        self.jobs.end(job)
        self.counts["jobs lost"] += 1
        print(
            f"paceline: job {job.terms.name!r}: {reason}", file=sys.stderr, flush=True
        )

    def _drop(self, peer: socket.socket) -> None:
        self._known.pop(peer, None)
        self._loop.unwatch(peer)
        self._callers.close(peer)

    def _say(self, peer: socket.socket, words: msgspec.Struct) -> None:
        with contextlib.suppress(OSError):  # its end will be read
            peer.send(line_of(words))  # fits into an idle connection's buffer


def _destinations(out: Outgoing, ways: _Ways) -> tuple[Array, Array]:
    """Which row goes to which place of the job's table (-1: to nobody)."""
    to = out.to
    plain = np.flatnonzero(to != EVERYONE)
    known = np.full(max(ways.workers, default=0) + 1, -1, np.int64)
    for worker, place in ways.workers.items():
        known[worker] = place
    targets = to[plain]
    within = (targets >= 0) & (targets < len(known))
    places = np.where(within, known[np.where(within, targets, 0)], -1)
    if ways.next:  # they take turns, slot by slot
        slot = out.packets["header"]["slot"][plain]
        agents = np.array(ways.next)[slot % len(ways.next)]
        places = np.where(targets == NEXT, agents, places)
    rows, ends = [plain], [places]
    shared = np.flatnonzero(to == EVERYONE)
    turns = out.packets["header"]["slot"][shared] % len(ways.expected)
    for turn in np.unique(turns).tolist():
        mine, everyone = shared[turns == turn], ways.shared(turn)
        # One worker after the other: each one's buffer gets a run of datagrams.
        rows.append(np.tile(mine, len(everyone)))
        ends.append(np.repeat(everyone, len(mine)))
    return np.concatenate(rows), np.concatenate(ends)


def _listen(
    address: str, port: int, family: socket.AddressFamily
) -> tuple[socket.socket, socket.socket]:
    """A TCP listener and a UDP socket on one number."""
    fault: OSError | None = None
    for _ in range(1 if port else _TRIES):
        listener = None
        try:
            listener = socket.create_server((address, port), family=family)
            listener.setblocking(False)
            udp = open_socket(family)
            udp.bind((address, listener.getsockname()[1]))
        except (OSError, OverflowError) as error:
            fault = error if isinstance(error, OSError) else OSError(str(error))
            if listener is not None:
                listener.close()
                if not port:
                    continue
            break
        return listener, udp
    raise UsageError(
        f"an aggregator cannot listen at {address}, port {port} (TCP and UDP): {fault}; "
        "expected an address of this machine, and a port that is free (or 0)"
    )


def _plain(host: str) -> str:
    """An address, which is in numbers: names are not looked up, for that may take long.
    Raises `OSError`."""
    found = socket.getaddrinfo(
        host, None, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
    )
    return str(found[0][4][0])


def _port(port: int) -> int:
    if not 1 <= port <= 65535:
        raise UsageError(f"port {port}: expected 1 to 65535")
    return port
