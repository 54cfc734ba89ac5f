"""Random and mutated messages at the port of a running job: refused, and nothing else."""

import contextlib
import os
import random
import socket
from collections import Counter

import pytest
import torch
import zmq

from paceline.interfaces.server_messages import (
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
from paceline.methods.backup import Backup
from paceline.methods.osp.measurement import WorkerReport, encode_report
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.transport import protocol
from paceline.transport.listener import REFUSALS_LOGGED
from paceline.transport.shared_memory import BLOCK_BYTES, BLOCKS, WorkerEnd
from tests.support.hanging import SECONDS
from tests.support.server_jobs import TOKEN, Adder, Peer, connect, running, time_limit

HONEST = 2
ROGUE = 2
BATCH = 200
MEMORY_BYTES = 200e6

MESSAGES = [
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
        report=encode_report(
            WorkerReport(
                ready=[0.1], end=0.2, start_up=0.0, per_byte=1e-9, bytes=[16], part=0.5
            )
        ),
    ),
    Pull(bucket=0),
    PullState(bucket=0),
    PullState(bucket=0, units=[0], step=1),
    LoadState(bucket=0, entries=[[("momentum_buffer", 0)]]),
    Leave(),
    Reduce(channel="", number=0, operation="sum"),
]
HEADERS = [
    *(
        protocol.encode(protocol.RequestHeader(0, message, "float32", 4))
        for message in MESSAGES
    ),
    *(protocol.encode(protocol.RequestHeader(0, message)) for message in MESSAGES),
    protocol.encode(protocol.Hello(PROTOCOL, TOKEN, ROGUE, 1 << 40, "x")),
    protocol.encode(protocol.Hello(PROTOCOL, TOKEN, 0, 0, "")),
    protocol.encode(protocol.Bye()),
    protocol.encode(protocol.Welcome(1, "x")),
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


def strangers(rng, host, peer):
    """A batch from a connection that has the token, and is nobody: each is answered."""
    for _ in range(BATCH):
        peer.socket.send_multipart(message(rng))
    for _ in range(BATCH):
        words = peer.receive()
        assert isinstance(words, protocol.Rejected | protocol.Welcome)
        if isinstance(words, protocol.Welcome):  # it is somebody now, and starts anew
            return False
    return True


def place(rng, memory):
    """Where a payload lies, or may seem to."""
    put = memory.put(torch.zeros(BLOCK_BYTES))
    block, size = put or (rng.randrange(BLOCKS), BLOCK_BYTES)
    block = rng.choice((block, block, block + 1, 0, -1, BLOCKS - 1, BLOCKS, 1 << 62))
    return block, rng.choice((16, 16, size, 0, -1, 1 << 30, 1 << 62))


def rogues(rng, host, incarnation):
    """A batch from a worker that has gone mad; it is dropped soon, or leaves."""
    memory = WorkerEnd()
    with Peer(host.port, ROGUE, incarnation, memory=memory.offer()) as peer:
        memory.open(peer.welcome.memory)
        for number in range(BATCH):
            begin = protocol.RequestHeader(number, rng.choice(MESSAGES), "float32", 4)
            if rng.random() < 0.3:
                begin.place = place(rng, memory)
                peer.send(begin)
            elif rng.random() < 0.5:
                peer.send(begin, rng.randbytes(16))
            elif rng.random() < 0.9:
                header = mutated(rng, protocol.encode(begin))
                peer.socket.send_multipart([header, rng.randbytes(16)])
            else:
                peer.socket.send_multipart(message(rng))
        assert peer.socket.poll(1000 * SECONDS)


def not_even_zeromq(rng, host):
    """Bytes at both ports."""
    for port in (host.port, host.listener._liveness.getsockname()[1]):
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


class AddingJob:
    """Two workers that add up what they know."""

    def __init__(self):
        self.machine = Adder(HONEST)

    def join(self, servers):
        self.servers = servers

    def step(self, number):
        parts = [torch.full((1000,), rank + number % 7 + 0.5) for rank in range(HONEST)]
        expected = sum(part.clone() for part in parts)
        message = Reduce(channel="", number=number, operation="sum")
        pending_replies = [
            server.request(message, part, part)
            for server, part in zip(self.servers, parts, strict=True)
        ]
        for pending_reply, part in zip(pending_replies, parts, strict=True):
            pending_reply.wait()
            assert torch.equal(part, expected)

    def end(self):
        assert {worker for worker, _ in self.machine.lost} <= {ROGUE}


class TrainingJob:
    """Two workers that train a model on the server, beside one that does it alone."""

    def __init__(self):
        self.machine = ParameterServer(HONEST, lambda _: Backup().server(HONEST))
        self.rng = torch.Generator().manual_seed(0)
        self.model = torch.nn.Parameter(torch.randn(1000, generator=self.rng))
        self.sgd = torch.optim.SGD([self.model], lr=0.1, momentum=0.9)
        skip = ("params", "foreach", "fused", "differentiable")
        group = self.sgd.param_groups[0]
        self.how = [{key: group[key] for key in group if key not in skip}]

    def join(self, servers):
        self.servers = servers
        join = Join(
            options="",
            units=[[Unit(0, 0, 1000, 0, (1000,))]],
            dtypes=["float32"],
            optimizer="SGD",
            hyperparameters=self.how,
        )
        for server in servers:
            server.request(join).wait()
        servers[0].request(Load(bucket=0), self.model.detach()).wait()

    def step(self, number):
        gradients = [torch.randn(1000, generator=self.rng) for _ in self.servers]
        self.model.grad = gradients[0] * 0.5 + gradients[1] * 0.5
        self.sgd.step()
        push = Push(
            step=number,
            bucket=0,
            weight=0.5,
            used=[True],
            hyperparameters=self.how,
        )
        pending_replies = [
            server.request(push, gradient, gradient)
            for server, gradient in zip(self.servers, gradients, strict=True)
        ]
        for pending_reply, gradient in zip(pending_replies, gradients, strict=True):
            pending_reply.wait()
            assert torch.equal(gradient, self.model.detach())

    def end(self):
        assert self.machine.counts["pushes that came again"] == 0


def fuzz(job, count, seed):
    rng = random.Random(seed)
    with running(job.machine, HONEST + 1) as host, contextlib.ExitStack() as stack:
        servers = [connect(host, rank) for rank in range(HONEST)]
        peer = None
        job.join(servers)
        job.step(0)
        before = None
        for batch in range(1, count // BATCH + 1):
            if batch % 4 == 0:
                rogues(rng, host, batch)
            elif batch % 4 == 1:
                not_even_zeromq(rng, host)
            if peer is None:
                peer = stack.enter_context(Peer(host.port, known=False))
            if not strangers(rng, host, peer):
                peer.close()
                peer = None
            job.step(batch)
            if batch == 8:
                before = resident_bytes()
        assert resident_bytes() - before < MEMORY_BYTES
        job.end()
        for server in servers:
            server.close()
    for kind in ("stranger", "undecodable", "liveness", "order"):
        assert host.refused[kind], kind


@pytest.mark.parametrize("job", [AddingJob, TrainingJob])
def test_a_few_thousand_messages(job, caplog):
    with time_limit():
        fuzz(job(), 4000, seed=1)
    lines = caplog.messages
    kinds = Counter(line.partition("refused (")[2].partition(")")[0] for line in lines)
    assert max(kinds.values()) == REFUSALS_LOGGED
    told = [line for line in lines if line.endswith("more of these are only counted")]
    assert len(told) == list(kinds.values()).count(REFUSALS_LOGGED)
    assert all(line.isprintable() for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("job", [AddingJob, TrainingJob])
def test_a_hundred_thousand_messages(job):
    with time_limit(900):
        fuzz(job(), 100_000, seed=2)


def test_messages_of_many_and_of_large_frames():
    with (
        time_limit(),
        running(Adder(HONEST), HONEST + 1) as host,
        Peer(host.port, ROGUE) as peer,
    ):
        begin = protocol.RequestHeader(0, Load(bucket=0), "uint8", 1)
        peer.send(begin, *[b"x"] * 1000)
        assert isinstance(peer.receive(), protocol.ReplyHeader)
        assert host.refused == {"payload": 1}
        # More than a frame may hold: ZeroMQ itself ends the connection.
        monitor = peer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        peer.socket.send(bytes(protocol.LARGEST_ON_THE_WIRE + 1))
        assert monitor.poll(1000 * SECONDS)
        connect(host, 0).close()
