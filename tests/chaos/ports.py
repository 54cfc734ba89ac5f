"""Each listening socket of paceline, as `port_attacks` attacks it.

A port's server runs in a process of its own (`port_servers`). This process has the job's honest clients and
the attackers.

`PORTS` is the table of all ports. A port's class says how to send it a valid message (`opening`, `enter`), and
how to check the job behind it (`round`, `arrive`).

Not in the table: torch's store and gloo's connections (see ``docs/reference/security.md``), and the
sockets of emulated networks, which only this job's processes reach.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import itertools
import json
import random
import re
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np
import torch

from paceline.collectives.in_network import wire
from paceline.interfaces.consolidated_entry import ConsolidatedEntry
from paceline.interfaces.server_messages import (
    PROTOCOL,
    AdoptState,
    Describe,
    Enter,
    EnterBarrier,
    GetState,
    GetStatus,
    GradientUpdate,
    Join,
    KeepAlive,
    Leave,
    Load,
    LoadState,
    MixBuffers,
    Notice,
    Pull,
    PullState,
    Push,
    Quiesce,
    Reduce,
    Unit,
    Update,
)
from paceline.methods.osp.measurement import WorkerReport, encode_report
from paceline.runtimes.real import peer_monitor
from paceline.runtimes.real.hang_report import Whereabouts
from paceline.transport import protocol
from paceline.transport.protocol import ServiceKey
from paceline.transport.shared_memory import BLOCK_BYTES, BLOCKS, WorkerEnd
from tests.chaos.port_servers import HONEST, exactly, exchange, join_and_add
from tests.collectives.in_network.sums import HOST
from tests.support.server_jobs import TOKEN, connect

ROGUE = HONEST
"""The number of the worker that has the token and breaks the protocol."""
BATCH = 50
"""Messages between two checks. Smaller than any port's backlog."""
MEMORY_BYTES = 100 << 20
"""How much the server's resident memory may grow after the first messages."""
HELD = 100
"""Connections that stay, beside those of the batch."""
SECONDS = 60
"""The time for one check. A job that takes longer hangs."""
_TCP_REPAIR = 19
_AT_ONCE = struct.pack("ii", 1, 0)
"""For SO_LINGER: close with a reset."""


# ---- messages ----


def mutated(rng: random.Random, message: bytes) -> bytes:
    """Some bytes changed, cut off, doubled or put in; or a value nested too deeply."""
    data = bytearray(message)
    for _ in range(rng.choice((0, 1, 1, 2, 8))):
        where = rng.randrange(len(data) + 1)
        kind = rng.randrange(13)
        if kind < 2:
            data[where:where] = rng.randbytes(rng.choice((1, 4, 64)))
        elif kind < 4:
            del data[where:]
        elif kind < 6:
            data[where : where + 9] = b"\xcf" + rng.randbytes(8)  # a large number
        elif kind < 8:
            data += data[where : where + 10_000]
        elif kind == 8:
            data = bytearray(nested(rng, bytes(data)))
        elif kind == 9:
            data[where:where] = b"a" * 300
        elif kind == 10:
            numbers = [*re.finditer(rb"\d+", data)]
            if numbers:
                start, stop = rng.choice(numbers).span()
                data[start:stop] = rng.choice(NUMBERS)
        elif where < len(data):
            data[where] ^= 1 << rng.randrange(8)
    return bytes(data)


NUMBERS = (b"0", b"-1", b"1e999", b"65536", b"4294967296", b"9" * 30, b"null", b'""')


def nested(rng: random.Random, message: bytes) -> bytes:
    """*message* with a value that is nested more deeply than a decoder follows."""
    opened = [place.end() for place in re.finditer(rb"\{", message)]
    if opened:
        where = rng.choice(opened)
        return message[:where] + b'"x":' + b"[" * 3000 + message[where:]
    where = rng.randrange(len(message) + 1)
    return message[:where] + b"\x91" * 3000 + message[where:]


def random_bytes(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((1, 10, 100, 2000)))


# ---- ports ----


@dataclass
class Peer:
    """An authenticated connection that breaks the protocol. *send* sends a message, with its *mutate*."""

    sockets: list[socket.socket]
    send: Callable[[random.Random, Callable[[bytes], bytes]], None]
    way: str = "FIN"
    """How it leaves: see `leave`."""

    def close(self) -> None:
        for one in self.sockets:
            leave(one, self.way)


class Port:
    """One listening socket: how to speak to it, and how to check the job behind it.

    *place*: what the server's process has printed.
    """

    name: ClassVar[str]
    number: ClassVar[int] = 0
    """Which of the process's ports is attacked."""
    most_connections: ClassVar[int]
    """Descriptors that attackers may hold in the server's process at any moment."""
    varying: ClassVar[int] = 0
    """Descriptors that a server at rest may have open or not."""
    most_logged: ClassVar[int] = 100_000
    """Characters that the server may log, however many messages it refuses."""
    has_token: ClassVar[bool] = True
    needs: ClassVar[str] = ""
    """A module without which the port does not exist."""
    leaves: ClassVar[float] = 0.05
    """The probability that a peer with the token leaves before its next message."""

    def __init__(self, place: dict[str, object]) -> None:
        self.place = place
        self.port: int = place["ports"][self.number]  # type: ignore[index]
        self.numbers = itertools.count(1)

    def opening(self, rng: random.Random) -> bytes:
        """All that a peer without the token sends, from the connection's first byte."""
        raise NotImplementedError

    def enter(self, rng: random.Random) -> Peer:
        """A connection of a peer that has the token."""
        raise NotImplementedError

    def round(self, attack: Callable[[int], None]) -> None:
        """*attack* the port while the job is under way; then check the job's next result."""
        attack(self.port)
        self.work()

    def work(self) -> None:
        """Check the job's next result."""
        raise NotImplementedError

    def arrive(self) -> None:
        """A new honest client comes, is served correctly, and goes."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the honest clients."""


def dial(port: int) -> socket.socket:
    peer = socket.socket()
    peer.settimeout(SECONDS)
    try:
        peer.connect((HOST, port))
    except OSError:
        peer.close()
        raise
    return peer


def leave(peer: socket.socket, way: str) -> None:
    """Close the connection: with a FIN, with a reset ("RST"), or as a machine that has vanished."""
    with contextlib.suppress(OSError):
        if way == "RST":
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        elif way == "vanish":
            # Without the right to do so the connection ends with a FIN.
            peer.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
    peer.close()


# ---- parameter servers, group servers, liveness ----


def zmtp_frame(body: bytes, flags: int = 0) -> bytes:
    """One frame of ZeroMQ's protocol."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + struct.pack(">Q", len(body)) + body


def zmtp_message(*frames: bytes) -> bytes:
    last = len(frames) - 1
    return b"".join(zmtp_frame(one, int(i < last)) for i, one in enumerate(frames))


def zmtp_greeting() -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PLAIN".ljust(52, b"\0")


def zmtp_hello(token: str) -> bytes:
    user, password = b"paceline", token.encode()
    words = bytes([len(user)]) + user + bytes([len(password)]) + password
    return zmtp_frame(b"\x05HELLO" + words, 4)


def zmtp_initiate() -> bytes:
    kind = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    return zmtp_frame(b"\x08INITIATE" + kind, 4)


def zmtp_connect(peer: socket.socket, token: str) -> None:
    """What a DEALER does before its first message. ZeroMQ accepts no command before it has answered the last one."""
    peer.sendall(zmtp_greeting())
    exactly(peer, 64)
    for command, answer in (
        (zmtp_hello(token), b"\x07WELCOME"),
        (zmtp_initiate(), b"\x05READY"),
    ):
        peer.sendall(command)
        received = zmtp_read(peer)
        assert received.startswith(answer), received


def zmtp_read(peer: socket.socket) -> bytes:
    """The next frame's body."""
    flags, size = exactly(peer, 2)
    if flags & 2:
        size = int.from_bytes(bytes([size]) + exactly(peer, 7), "big")
    return exactly(peer, size)


HYPERPARAMETERS = [
    {
        "lr": 1.0,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "maximize": False,
    }
]
REPORT = WorkerReport(
    ready=[0.1], end=0.2, start_up=0.0, per_byte=1e-9, bytes=[16], part=0.5
)
REQUESTS = [
    Join(options="x", units=[[Unit(0, 0, 4, 0)]], dtypes=["float32"], optimizer="SGD"),
    Load(bucket=0),
    Push(step=0, bucket=0, used=[True], hyperparameters=[{"lr": 0.1, "betas": [1, 2]}]),
    Push(
        step=0,
        bucket=0,
        late=True,
        units=[0],
        used=[True],
        hyperparameters=[{"lr": 0.1}],
        report=encode_report(REPORT),
    ),
    Pull(bucket=0),
    PullState(bucket=0),
    PullState(bucket=0, units=[0], step=1),
    LoadState(bucket=0, entries=[[("momentum_buffer", 0)]]),
    MixBuffers(weight=0.5, floats=1),
    EnterBarrier(kind="meet"),
    KeepAlive(),
    Leave(),
    Reduce(channel="", number=0, operation="sum"),
    Describe(kind="server", services=["server 0", "server 1"], number=1),
    Update(
        source=1,
        incarnation=0,
        number=0,
        floor=0,
        load=0,
        cut=0,
        entry=0,
        what=GradientUpdate(
            bucket=0, gradients=1, weight=1.0, used=[True], hyperparameters=[{}]
        ),
    ),
    Notice(incarnation=0, number=0, content=b"notice"),
    GetStatus(incarnation=0),
    Enter(incarnation=0, entry=0, via=0),
    GetState(key=0, part=0),
    Quiesce(incarnation=0, cut=0),
    AdoptState(cut=0),
]


class ParameterServerPort(Port):
    """Workers' messages, by ZeroMQ."""

    name = "parameter server"
    most_connections = BATCH + HELD + 100
    method = "backup"

    def __init__(self, place: dict[str, object]) -> None:
        super().__init__(place)
        self.messages: int = place["ports"][0]  # type: ignore[index]
        self.liveness: int = place["ports"][1]  # type: ignore[index]
        self.workers = [self._connect(rank) for rank in range(HONEST)]
        join = Join(
            options="",
            method=self.method,
            units=[[Unit(0, 0, 1000, 0, (1000,))]],
            dtypes=["float32"],
            optimizer="SGD",
            hyperparameters=HYPERPARAMETERS,
        )
        for worker in self.workers:
            worker.request(join).wait()
        self.model = torch.zeros(1000)
        self.workers[0].request(Load(bucket=0), self.model).wait()
        self.step = 0

    def _connect(self, rank: int, incarnation: int = 0):
        return connect(self, rank, incarnation, port=self.messages)

    def opening(self, rng: random.Random) -> bytes:
        token = rng.choice((TOKEN, "a wrong token"))
        hello = protocol.Hello(
            PROTOCOL, token, ROGUE, rng.choice((None, 0, 1 << 40)), ""
        )
        words = rng.choice((hello, protocol.Bye(), protocol.Welcome(1, "x")))
        start = zmtp_greeting() + zmtp_hello(token)
        return start + zmtp_initiate() + zmtp_message(protocol.encode(words))

    def enter(self, rng: random.Random) -> Peer:
        """A worker outside of the job; or one of another training of this server."""
        peer = dial(self.messages)
        memory = WorkerEnd()
        service = ServiceKey(rng.choice((0, rng.randrange(1, 20))), 0)
        worker = rng.randrange(HONEST + 1) if service.training else ROGUE
        hello = protocol.Hello(PROTOCOL, TOKEN, worker, next(self.numbers), "")
        hello.service, hello.memory = service, memory.offer()
        words = zmtp_message(protocol.encode(hello))
        sockets = [peer]
        try:
            zmtp_connect(peer, TOKEN)
            peer.sendall(words)
            welcome = protocol.decode_from_server(zmtp_read(peer))
            if isinstance(welcome, protocol.Welcome):
                memory.open(welcome.memory)
                liveness = dial(welcome.port)
                sockets.append(liveness)
                liveness.sendall(welcome.ticket.encode() + b"\n")
                exactly(liveness, 1)
            else:
                memory.close()
        except BaseException:
            memory.close()
            for one in sockets:
                one.close()
            raise
        numbers = itertools.count()

        def send(rng: random.Random, mutate: Callable[[bytes], bytes]) -> None:
            message = rng.choice(REQUESTS)
            header = protocol.RequestHeader(next(numbers), message, "float32", 4)
            frames = [rng.randbytes(rng.choice((0, 1, 16, 16, 16, 5000)))]
            if rng.random() < 0.3:
                header.place, frames = _place_in(rng, memory), []
            elif rng.random() < 0.2:
                header.dtype, header.elements, frames = None, 0, []
            words = protocol.encode(header)
            if rng.random() < 0.7:
                words = mutate(words)
            peer.sendall(zmtp_message(words, *frames))

        return Peer(sockets, send)

    def work(self) -> None:
        """A step: each server pushes half a gradient of whole numbers."""
        gradients = [torch.full((1000,), 2.0 * rank + self.step % 7) for rank in (1, 2)]
        push = Push(
            step=self.step,
            bucket=0,
            weight=0.5,
            used=[True],
            hyperparameters=HYPERPARAMETERS,
        )
        replies = [
            worker.request(push, gradient)
            for worker, gradient in zip(self.workers, gradients, strict=True)
        ]
        for reply in replies:
            reply.wait()
        self.model -= (gradients[0] + gradients[1]) / 2
        self.step += 1
        found = torch.empty(1000)
        for worker in self.workers:
            pull = Pull(bucket=0, step=self.step)
            worker.request(pull, into=found).wait()
            assert torch.equal(found, self.model), f"step {self.step}: {found[0]}"

    def arrive(self) -> None:
        newcomer = self._connect(ROGUE, next(self.numbers))
        newcomer.close()

    def close(self) -> None:
        for worker in self.workers:
            worker.part(well=False)


def _place_in(rng: random.Random, memory: WorkerEnd) -> tuple[int, int]:
    """A payload's place in shared memory, or a pretended one."""
    put = memory.put(torch.zeros(BLOCK_BYTES))
    block, size = put or (rng.randrange(BLOCKS), BLOCK_BYTES)
    block = rng.choice((block, block, block + 1, 0, -1, BLOCKS - 1, BLOCKS, 1 << 62))
    return block, rng.choice((16, 16, size, 0, -1, 1 << 30, 1 << 62))


class LivenessPort(ParameterServerPort):
    """The connections whose end shows a parameter server that a worker has died."""

    name = "liveness"
    number = 1

    def opening(self, rng: random.Random) -> bytes:
        return rng.choice((b"0" * 32 + b"\n", b"bye\n", b"\n"))

    def enter(self, rng: random.Random) -> Peer:
        peer = super().enter(rng)

        def send(rng: random.Random, mutate: Callable[[bytes], bytes]) -> None:
            peer.sockets[-1].sendall(mutate(rng.choice((b"bye\n", b"0" * 32 + b"\n"))))

        return Peer(peer.sockets, send)


class GroupServerPort(ParameterServerPort):
    """A group server: messages of its workers and of other group servers."""

    name = "group server"
    method = "gssp:members=0-1"


# ---- workers ----


class FailureHubPort(Port):
    """Rank 0's heartbeat port: it tells all ranks which one has died."""

    name = "failure hub"
    leaves = 0.2
    most_connections = HONEST + 1 + peer_monitor.STRANGERS + 30

    def __init__(self, place: dict[str, object]) -> None:
        super().__init__(place)
        self.ranks = [self._join(rank) for rank in range(HONEST)]
        self.files = [rank.makefile("rb") for rank in self.ranks]
        self.reported = 0

    def _hello(self, rank: int, token: str) -> bytes:
        words = peer_monitor.Hello(token=token, rank=rank, host="here", process=1)
        return peer_monitor.line_of(words)

    def _join(self, rank: int) -> socket.socket:
        peer = dial(self.port)
        peer.sendall(self._hello(rank, str(self.place["token"])))
        return peer

    def opening(self, rng: random.Random) -> bytes:
        return self._hello(ROGUE, "0" * 32) + rng.choice(self._news())

    def enter(self, rng: random.Random) -> Peer:
        peer = self._join(ROGUE)
        news = self._news()

        def send(rng: random.Random, mutate: Callable[[bytes], bytes]) -> None:
            peer.sendall(mutate(rng.choice(news)))

        return Peer([peer], send)

    def _news(self) -> list[bytes]:
        entry = ConsolidatedEntry(training=0, count=1, half=3, how="inside")
        where = Whereabouts(step=1, waits=True, still=1e9, stack=["f"])
        notice = peer_monitor.FailureNotice
        return [
            peer_monitor.line_of(words)
            for words in (
                notice(rank=0),
                notice(rank=0, fault="failed", training=3),
                notice(rank=0, entry=entry),
                notice(rank=0, where=where),
                notice(rank=0, asks=True),
            )
        ]

    def work(self) -> None:
        """Both ranks receive the entry of the second one, and of no other one's death."""
        self.reported += 1
        entry = ConsolidatedEntry(training=7, count=self.reported, half=0, how="beyond")
        words = peer_monitor.FailureNotice(rank=1, entry=entry)
        self.ranks[1].sendall(peer_monitor.line_of(words))
        for file in self.files:
            self._check_notice(file, entry)

    def _check_notice(self, file, entry: ConsolidatedEntry) -> None:
        for line in file:
            news = msgspec.json.decode(line, type=peer_monitor.FailureNotice)
            if (news.rank, news.entry) == (1, entry):
                return
            assert news.rank == ROGUE or news.asks, f"a false alarm: {news}"
        raise EOFError("the hub has closed an honest rank's connection")

    def arrive(self) -> None:
        newcomer = self._join(ROGUE)
        entry = ConsolidatedEntry(
            training=8, count=next(self.numbers), half=0, how="left"
        )
        words = peer_monitor.FailureNotice(rank=0, entry=entry)
        newcomer.sendall(peer_monitor.line_of(words))
        received = exactly(newcomer, 1)
        assert received == b"{", received
        newcomer.sendall(peer_monitor.line_of(peer_monitor.FailureNotice(rank=0)))
        newcomer.close()

    def close(self) -> None:
        for one in [*self.files, *self.ranks]:
            one.close()


class AggregatorPort(Port):
    """In-network aggregation: sums of a rack's workers."""

    name = "aggregator"
    leaves = 0.3
    most_logged = sys.maxsize  # a line for each job that ends badly
    most_connections = 2 * HELD + BATCH

    def __init__(self, place: dict[str, object]) -> None:
        super().__init__(place)
        terms = self._terms("the job", HONEST)
        self.workers = [self._join(rank, terms) for rank in range(HONEST)]
        self.position = 0

    def _terms(self, job: str, workers: int = 1) -> wire.Terms:
        return wire.Terms(job=job, expected=(workers,), window=2, chunk_bytes=4096)

    def _join(self, rank: int, terms: wire.Terms) -> socket.socket:
        one = wire.Registration((HOST, self.port), TOKEN, "the aggregator")
        try:
            one.send_hello("worker", rank, f"rank {rank}", terms)
            peer = one.granted()[0].socket
        except BaseException:
            one.close()
            raise
        peer.settimeout(SECONDS)
        return peer

    def _hello(self, rng: random.Random) -> wire.Hello:
        own = self._terms(f"job {next(self.numbers)}")
        parents = (wire.Parent(HOST, self.port, 0, own),)
        terms = rng.choice(
            (
                own,
                self._terms("a job of three", 3),
                msgspec.structs.replace(
                    own, job="above", leased=False, parent_of=(0,), agents=1
                ),
            )
        )
        return wire.Hello(
            role=rng.choice(("worker", "agent", "aggregator")),
            number=rng.randrange(2),
            name="a rogue",
            terms=terms,
            parents=parents if terms.parent_of == (0,) else (),
            nonce="0",
        )

    def opening(self, rng: random.Random) -> bytes:
        hello = _framed(wire.Kind.HELLO, msgspec.json.encode(self._hello(rng)))
        return hello + rng.choice(self._frames())

    def _frames(self) -> list[bytes]:
        numbers = np.arange(256, dtype=np.int32).tobytes()
        kinds = wire.Kind
        return [
            _framed(kinds.CONTRIBUTION, numbers, members=1),
            _framed(kinds.CONTRIBUTION, numbers, members=1, mode=1),
            _framed(kinds.MAXIMUM, numbers, position=1, members=1),
            _framed(kinds.CONTRIBUTION, members=1),
            _framed(kinds.SUM, numbers),
            _framed(kinds.GOODBYE),
            _framed(kinds.LOST, b"over"),
            _framed(kinds.GRANTED, b"{}"),
        ]

    def enter(self, rng: random.Random) -> Peer:
        """A peer with the token. Its terms are mutated, and its proof is right."""
        peer = dial(self.port)
        try:
            header = wire.Header(*wire.HEADER.unpack(exactly(peer, wire.HEADER.size)))
            words = exactly(peer, header.size)
            nonce = msgspec.json.decode(words, type=wire.Challenge).nonce
            hello = self._hello(rng)
            with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
                words = mutated(rng, msgspec.json.encode(hello))
                hello = msgspec.json.decode(words, type=wire.Hello)
            hello = self._kept_apart(hello)
            hello.proof = wire.proof_of(TOKEN, nonce, hello)
            peer.sendall(_framed(wire.Kind.HELLO, msgspec.json.encode(hello)))
        except BaseException:
            peer.close()
            raise
        frames = self._frames()

        def send(rng: random.Random, mutate: Callable[[bytes], bytes]) -> None:
            peer.sendall(mutate(rng.choice(frames)))

        return Peer([peer], send)

    def _kept_apart(self, hello: wire.Hello) -> wire.Hello:
        """Not of the honest job, and without connections to others on this machine."""
        replace = msgspec.structs.replace
        parents = []
        for one in hello.parents:
            with contextlib.suppress(ValueError):
                ipaddress.ip_address(one.host)
                port = self.port if 0 <= one.port < 1 << 17 else one.port
                one = replace(one, host=HOST, port=port)
            terms = replace(one.terms, job=f"rogue {one.terms.job}")
            parents.append(replace(one, terms=terms))
        terms = replace(hello.terms, job=f"rogue {hello.terms.job}")
        return replace(hello, terms=terms, parents=tuple(parents))

    def work(self) -> None:
        numbers = np.full(256, self.position % 1000, np.int32)
        self._sum(self.workers, numbers, self.position)
        self.position += 1

    def _sum(
        self, workers: list[socket.socket], numbers: np.ndarray, position: int
    ) -> None:
        words = numbers.tobytes()
        for worker in workers:
            worker.sendall(
                _framed(wire.Kind.CONTRIBUTION, words, position=position, members=1)
            )
        for worker in workers:
            head = wire.Header(*wire.HEADER.unpack(exactly(worker, wire.HEADER.size)))
            received = exactly(worker, head.size)
            assert (head.kind, head.position) == (wire.Kind.SUM, position), (
                f"{head}: {received!r}"
            )
            found = np.frombuffer(received, np.int32)
            assert (found == len(workers) * numbers).all(), found

    def arrive(self) -> None:
        newcomer = self._join(0, self._terms(f"newcomer {next(self.numbers)}"))
        self._sum([newcomer], np.arange(256, dtype=np.int32), 0)
        newcomer.sendall(_framed(wire.Kind.GOODBYE))
        newcomer.close()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def _framed(
    kind: wire.Kind,
    payload: bytes = b"",
    position: int = 0,
    members: int = 0,
    mode: int = 0,
) -> bytes:
    return wire.HEADER.pack(position, len(payload), members, kind, mode) + payload


class RingPort(Port):
    """A worker without an aggregator, where the next one of the ring connects. It listens while they join."""

    name = "ring"
    most_connections = 2 * HELD + BATCH
    varying = 1  # the socket that listens for the next ring

    def __init__(self, place: dict[str, object]) -> None:
        super().__init__(place)
        self.other = dial(self.port)
        self.rings = 0

    def opening(self, rng: random.Random) -> bytes:
        terms = wire.Terms(job="job", expected=(1,), window=2, chunk_bytes=1024)
        hello = wire.Hello(
            role="agent", number=0, name="rank 1", terms=terms, nonce="0"
        )
        return _framed(wire.Kind.HELLO, msgspec.json.encode(hello))

    has_token = False
    """A peer with the token is the next worker: there is one, and it is honest."""

    def round(self, attack: Callable[[int], None]) -> None:
        """*attack* between the moment when the worker listens and the moment when it accepts."""
        exchanged: list[bytes] = []

        def spying(words: bytes) -> list[bytes]:
            answers = exchange(1, self.other, words)
            if not exchanged:
                attack(json.loads(answers[0])["listens"][1])
            exchanged.append(words)
            return answers

        join_and_add(1, self.rings, spying)
        self.rings += 1

    def work(self) -> None:
        self.round(lambda port: None)

    def arrive(self) -> None:
        """Each round has new connections."""

    def close(self) -> None:
        self.other.close()


# ---- metrics, and the controls' port ----


class MetricsPort(Port):
    """Counters for Prometheus, by HTTP."""

    name = "metrics"
    needs = "prometheus_client"
    most_connections = 50
    has_token = False

    def opening(self, rng: random.Random) -> bytes:
        path = rng.choice(("/metrics", "/", "/metrics?name[]=x"))
        return (
            f"GET {path} HTTP/1.1\r\nHost: here\r\nAccept: text/plain\r\n"
            "Accept-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello"
        ).encode()

    def work(self) -> None:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=SECONDS)
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        assert "paceline_workers 3.0" in text, f"{answer.status}: {text}"

    arrive = work


class EchoPort(Port):
    """The port of controls: it echoes lines."""

    name = "echo"
    most_connections = 2 * HELD + BATCH
    has_token = False

    def opening(self, rng: random.Random) -> bytes:
        return b"some words\xff\n"

    def work(self) -> None:
        words = b"line %d\n" % next(self.numbers)
        with dial(self.port) as peer:
            peer.sendall(words)
            received = exactly(peer, len(words))
        assert received == words, received

    arrive = work


PORTS: dict[str, type[Port]] = {
    port.name: port
    for port in (
        ParameterServerPort,
        LivenessPort,
        GroupServerPort,
        FailureHubPort,
        AggregatorPort,
        RingPort,
        MetricsPort,
    )
}
"""All listening sockets of paceline."""
