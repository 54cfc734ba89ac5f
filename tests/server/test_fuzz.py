"""Random and mutated messages at the port of a running job: refused, and nothing else."""

import contextlib
import os
import random
import socket

import pytest
import torch
import zmq

from paceline.messages import (
    PROTOCOL,
    Join,
    Leave,
    Load,
    LoadState,
    Pull,
    PullState,
    Push,
    Reduce,
    Unit,
)
from paceline.server import wire
from tests.server import TOKEN, Adder, Peer, connect, running, time_limit

HONEST = 2
ROGUE = 2
BATCH = 200
MEMORY_BYTES = 200e6

MESSAGES = [
    Join(options="x", units=[[Unit(0, 0, 4, 0)]], dtypes=["float32"], optimizer="SGD"),
    Load(bucket=0),
    Push(step=0, bucket=0, used=[True], hyperparameters=[{"lr": 0.1, "betas": [1, 2]}]),
    Pull(bucket=0),
    PullState(bucket=0),
    LoadState(bucket=0, entries=[[("momentum_buffer", 0)]]),
    Leave(),
    Reduce(channel="", number=0, operation="sum"),
]
HEADERS = [
    *(wire.encode(wire.Begin(0, 0, message, "float32", 4)) for message in MESSAGES),
    *(wire.encode(wire.Begin(0, 0, message)) for message in MESSAGES),
    wire.encode(wire.Hello(PROTOCOL, TOKEN, ROGUE, 1 << 40, "x")),
    wire.encode(wire.Hello(PROTOCOL, TOKEN, 0, 0, "")),
    wire.encode(wire.More(0)),
    wire.encode(wire.Bye()),
    wire.encode(wire.Welcome(1, "x")),
]


def mutated(rng, header):
    """Some bytes changed, cut off, doubled or put in."""
    data = bytearray(header)
    for _ in range(rng.choice((0, 1, 1, 2, 8))):
        where = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            data[where:where] = rng.randbytes(rng.choice((1, 4, 64)))
        elif kind == 1:
            del data[where:]
        elif kind == 2:
            data[where : where + 9] = b"\xcf" + rng.randbytes(8)  # a large number
        elif kind == 3:
            data += data[where:]
        elif where < len(data):
            data[where] ^= 1 << rng.randrange(8)
    return bytes(data)


def message(rng):
    """The frames of one message."""
    if rng.random() < 0.2:
        return [rng.randbytes(rng.choice((0, 1, 10, 100, 2000)))]
    frames = [mutated(rng, rng.choice(HEADERS))]
    while rng.random() < 0.5:
        frames.append(rng.randbytes(rng.choice((0, 1, 16, 16, 16, 5000))))
    return frames


def strangers(rng, shell, peer):
    """A batch from a connection that has the token, and is nobody: each is answered."""
    for _ in range(BATCH):
        peer.socket.send_multipart(message(rng))
    for _ in range(BATCH):
        words = peer.hear()
        assert isinstance(words, wire.Rejected | wire.Welcome)
        if isinstance(words, wire.Welcome):  # it is somebody now, and starts anew
            return False
    return True


def rogues(rng, shell, incarnation):
    """A batch from a worker that has gone mad; it is dropped soon, or leaves."""
    with Peer(shell.port, ROGUE, incarnation) as peer:
        for number in range(BATCH):
            begin = wire.Begin(number, number, rng.choice(MESSAGES), "float32", 4)
            if rng.random() < 0.5:
                peer.say(begin, rng.randbytes(16))
            elif rng.random() < 0.9:
                header = mutated(rng, wire.encode(begin))
                peer.socket.send_multipart([header, rng.randbytes(16)])
            else:
                peer.socket.send_multipart(message(rng))
        assert peer.socket.poll(20_000)


def not_even_zeromq(rng, shell):
    """Bytes at both ports."""
    for port in (shell.port, shell._liveness_port):
        for _ in range(3):
            with (
                socket.create_connection(("127.0.0.1", port), 20) as connection,
                contextlib.suppress(OSError),
            ):
                greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00PLAIN" + bytes(47)
                start = rng.choice((b"", greeting, b"GET / HTTP/1.1\r\n\r\n"))
                connection.sendall(start + rng.randbytes(rng.choice((1, 70, 3000))))


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def reduce_once(servers, number):
    """The honest workers' result."""
    parts = [torch.full((1000,), rank + number % 7 + 0.5) for rank in range(HONEST)]
    expected = sum(part.clone() for part in parts)
    receptions = [
        server.request(Reduce(channel="", number=number, operation="sum"), part, part)
        for server, part in zip(servers, parts, strict=True)
    ]
    for reception, part in zip(receptions, parts, strict=True):
        reception.wait()
        assert torch.equal(part, expected)


def fuzz(count, seed):
    rng = random.Random(seed)
    adder = Adder(HONEST)
    with running(adder, HONEST + 1) as shell, contextlib.ExitStack() as stack:
        servers = [connect(shell, rank) for rank in range(HONEST)]
        peer = None
        reduce_once(servers, 0)
        before = None
        for batch in range(1, count // BATCH + 1):
            if batch % 4 == 0:
                rogues(rng, shell, batch)
            elif batch % 4 == 1:
                not_even_zeromq(rng, shell)
            if peer is None:
                peer = stack.enter_context(Peer(shell.port, known=False))
            if not strangers(rng, shell, peer):
                peer.close()
                peer = None
            reduce_once(servers, batch)
            if batch == 8:
                before = resident_bytes()
        assert resident_bytes() - before < MEMORY_BYTES
        assert {worker for worker, _ in adder.lost} <= {ROGUE}
        for server in servers:
            server.close()
    for kind in ("stranger", "undecodable", "liveness", "order"):
        assert shell.refused[kind], kind


def test_a_few_thousand_messages(capfd):
    with time_limit(60):
        fuzz(4000, seed=1)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[-1].endswith("more are only counted")
    assert all(line.isprintable() for line in lines)


@pytest.mark.slow
def test_a_million_messages():
    with time_limit(1800):
        fuzz(1_000_000, seed=2)


def test_messages_of_many_and_of_large_frames():
    with (
        time_limit(60),
        running(Adder(HONEST), HONEST + 1) as shell,
        Peer(shell.port, ROGUE) as peer,
    ):
        begin = wire.Begin(0, 0, Load(bucket=0), "uint8", 1)
        peer.say(begin, *[b"x"] * 1000)
        assert isinstance(peer.hear(), wire.Answered)
        assert shell.refused == {"payload": 1}
        # More than a frame may hold: ZeroMQ itself ends the connection.
        monitor = peer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        peer.socket.send(bytes(wire.FRAME_BYTES + 1))
        assert monitor.poll(20_000)
        connect(shell, 0).close()
