"""Payloads between processes of one machine: what arrives, and what stands in the way."""

import contextlib
import fcntl
import gc
import os
import signal
import socket
from pathlib import Path

import pytest
import torch

from paceline.errors import UsageError
from paceline.interfaces.server_messages import (
    DTYPES,
    Done,
    Load,
    Parameters,
    Pull,
    Reduce,
)
from paceline.transport import protocol, shared_memory
from paceline.transport.protocol import ProtocolError
from paceline.transport.shared_memory import BLOCKS, ServerMemory, WorkerEnd
from tests.support.server_jobs import (
    SECONDS,
    Adder,
    Busy,
    Peer,
    child,
    connect,
    ended,
    running,
    time_limit,
)

BLOCK = shared_memory.BLOCK_BYTES
MEMORY = shared_memory.MEMORY_BYTES
FILE = shared_memory._PAGE + MEMORY


@pytest.fixture(autouse=True)
def _limit():
    with time_limit():
        yield


@pytest.fixture
def frames(monkeypatch):
    """Sizes of the payloads that passed sockets."""
    seen = []
    send = protocol.send

    def noting(socket, header, payload=None):
        if payload is not None:
            seen.append(protocol.size_of(payload))
        send(socket, header, payload)

    monkeypatch.setattr(protocol, "send", noting)
    return seen


def values(size, first=0):
    """A payload of *size* bytes."""
    return torch.arange(first, first + size // 4, dtype=torch.int32)


def load(server, bucket, payload):
    assert server.request(Load(bucket=bucket), payload).wait() == Done()


def pull(server, bucket, size):
    got = torch.zeros(size // 4, dtype=torch.int32)
    reply = server.request(Pull(bucket=bucket), into=got).wait()
    assert reply == Parameters(bucket=0, version=0)
    return got


def echo(server, size):
    load(server, 0, values(size))
    assert torch.equal(pull(server, 0, size), values(size))


def held():
    """How many memories this process has mapped, and how many descriptors of such."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("memfd:paceline")
    descriptors = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptors += "paceline" in os.readlink(f"/proc/self/fd/{name}")
    return maps, descriptors


class Ends:
    """A server's, and those of *workers* workers, in one process."""

    def __init__(self, workers):
        self.memory = ServerMemory()
        self.workers = [WorkerEnd() for _ in range(workers)]
        self.servers = [self.memory.share(worker.offer()) for worker in self.workers]
        for worker, server in zip(self.workers, self.servers, strict=True):
            worker.open(server.memory)


# ---- what arrives ----


def test_payloads_pass_no_socket_if_they_are_worth_a_block_and_have_room(frames):
    with running(Adder(1), 1) as listener:
        server = connect(listener)
        for size in (BLOCK, BLOCK + 4, 5 * BLOCK, MEMORY // 2):
            echo(server, size)
        assert not frames
        for size in (0, 4, BLOCK - 4, MEMORY + 4):
            echo(server, size)
        server.close()
    assert frames == [
        *(0, 0, 4, 4),
        *(BLOCK - 4, BLOCK - 4, MEMORY + 4, MEMORY + 4),
    ]
    assert not listener.refused


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_payloads_of_all_types(dtype, frames):
    sent = (torch.arange(BLOCK) % 97).to(dtype).requires_grad_(dtype.is_floating_point)
    got = torch.zeros_like(sent, requires_grad=False)
    with running(Adder(1), 1) as listener:
        server = connect(listener)
        load(server, 0, sent)
        server.request(Pull(bucket=0), into=got).wait()
        server.close()
    assert torch.equal(got, sent)
    assert not frames


def test_blocks_are_free_when_the_payload_is_gone_and_not_before(frames):
    quarter = MEMORY // 4
    with running(Adder(1), 1) as listener:
        server = connect(listener)
        for bucket in range(4):
            load(server, bucket, values(quarter, bucket))
        assert not frames
        load(server, 4, values(quarter, 4))  # all is in use
        assert frames == [quarter]
        for bucket in range(5):
            assert torch.equal(pull(server, bucket, quarter), values(quarter, bucket))
        load(server, 1, values(4))  # instead of what was there
        load(server, 5, values(quarter, 5))
        for bucket in (0, 2, 3, 4, 5):
            assert torch.equal(pull(server, bucket, quarter), values(quarter, bucket))
        server.close()
    assert frames == [quarter, 4]


def test_nobody_waits_for_room(frames):
    """This server reads nothing while the worker sends."""
    busy = Busy(1)
    half = MEMORY // 2
    with running(busy, 1) as listener:
        server = connect(listener)
        loads = [
            server.request(Load(bucket=bucket), values(half, bucket))
            for bucket in range(4)
        ]
        busy.may_go_on.set()
        for loading in loads:
            assert loading.wait() == Done()
        for bucket in range(4):
            assert torch.equal(pull(server, bucket, half), values(half, bucket))
        server.close()
    assert frames == [half] * 2


def test_blocks_of_what_was_refused_are_free_again(frames):
    half = MEMORY // 2
    with running(Adder(1), 1, max_payload_bytes=half) as listener:
        server = connect(listener)
        for _ in range(3):
            with pytest.raises(UsageError, match="at most"):
                load(server, 0, values(half + 4))
            load(
                server, 1, values(4)
            )  # the server has let go when it takes the next one
        load(server, 0, values(half))
        for _ in range(3):  # the other way
            with pytest.raises(UsageError, match="handed over"):
                pull(server, 0, 8)
            assert server.request(Pull(bucket=0)).wait() == Parameters(
                bucket=0, version=0
            )
        assert torch.equal(pull(server, 0, half), values(half))
        server.close()
    assert frames == [4] * 3


def test_workers_of_one_machine_and_others_get_the_same_answers(frames, monkeypatch):
    with running(Adder(3), 3) as listener:
        near = [connect(listener, worker) for worker in range(2)]
        monkeypatch.setenv(shared_memory.SWITCH, "0")
        servers = [*near, connect(listener, 2)]
        for number in range(3):
            got = [torch.full((BLOCK,), float(number + rank)) for rank in range(3)]
            message = Reduce(channel="", number=number, operation="sum")
            pending_replies = [
                server.request(message, own, into=own)
                for server, own in zip(servers, got, strict=True)
            ]
            for pending_reply, own in zip(pending_replies, got, strict=True):
                pending_reply.wait()
                assert torch.equal(own, torch.full((BLOCK,), 3.0 * number + 3))
        for server in servers:
            server.close()
    assert frames == [4 * BLOCK] * 6  # the third one's, both ways


def test_a_reply_to_several_is_copied_once_a_batch():
    ends = Ends(3)
    payload = values(2 * BLOCK)
    places = [server.put(payload) for server in ends.servers]
    assert places == [(0, 2 * BLOCK)] * 3
    for worker in ends.workers:
        assert worker.lend(places[0]) == payload.view(torch.uint8).numpy().data
    # It may be sent again, to one who has read it or, in another place, to one who has not.
    assert ends.servers[0].put(values(BLOCK)) == (2, BLOCK)
    assert [ends.servers[0].put(payload)[0] for _ in range(2)] == [0, 3]
    ends.memory.batch_ended()
    payload.zero_()
    place = ends.servers[1].put(payload)
    assert not any(ends.workers[1].lend(place))


def test_blocks_of_replies_are_free_when_all_have_read_or_left():
    ends = Ends(2)
    payload = values(MEMORY)
    place = ends.servers[0].put(payload)
    assert ends.servers[1].put(payload) == place
    ends.memory.batch_ended()
    assert ends.servers[0].put(values(BLOCK)) is None
    ends.workers[0].lend(place)
    assert ends.servers[0].put(values(BLOCK)) is None
    ends.servers[1].close()
    assert ends.servers[0].put(values(BLOCK)) == (0, BLOCK)
    assert ends.servers[1].put(values(BLOCK)) is None


# ---- places where nothing lies ----


@pytest.mark.parametrize(
    "place",
    [
        (-1, BLOCK),
        (BLOCKS, BLOCK),
        (BLOCKS - 1, 2 * BLOCK),
        (0, MEMORY + 1),
        (0, 0),
        (0, -1),
        (1 << 62, 1 << 62),
        (2, BLOCK),  # free
        (1, 2 * BLOCK),  # half of it is
    ],
)
def test_places_that_are_none(place):
    ends = Ends(1)
    [worker], [server] = ends.workers, ends.servers
    for sender, receiver in ((worker, server), (server, worker)):
        assert sender.put(values(2 * BLOCK)) == (0, 2 * BLOCK)
        with pytest.raises(ProtocolError) as caught:
            receiver.lend(place)
        assert caught.value.kind == "payload"
        receiver.lend((0, 2 * BLOCK))


def test_a_place_is_lent_once_at_a_time():
    ends = Ends(1)
    [worker], [server] = ends.workers, ends.servers
    place = worker.put(values(2 * BLOCK))
    lent = torch.frombuffer(server.lend(place), dtype=torch.int32)
    for overlapping in (place, (1, BLOCK)):
        with pytest.raises(ProtocolError):
            server.lend(overlapping)
    part = lent[5:6]
    del lent
    assert worker.put(values(BLOCK)) == (2, BLOCK), "a view keeps it all"
    assert part == 5
    del part
    assert worker.put(values(BLOCK)) == (0, BLOCK)


def test_a_wrong_place_is_refused_and_harms_nobody():
    memory = WorkerEnd()
    with (
        running(Adder(2), 2) as listener,
        Peer(listener.port, 1, memory=memory.offer()) as peer,
    ):
        memory.open(peer.welcome.memory)
        place = memory.put(values(BLOCK))
        header = protocol.RequestHeader(0, Load(bucket=0), "int32", BLOCK // 4)
        header.place = (7, BLOCK)
        peer.send(header)
        assert "block 7" in peer.receive().message.reason
        for number, elements, frames in ((1, 4, []), (3, BLOCK // 4, [b"x"])):
            # Other elements, and a frame beside it.
            header.number, header.elements, header.place = number, elements, place
            peer.send(header, *frames)
            assert "payload" in peer.receive().message.reason
            peer.send(protocol.RequestHeader(number + 1, Pull(bucket=1)))
            assert "only adds" in peer.receive().message.reason
            assert memory.put(values(BLOCK)) == place, "it is free again"
        server = connect(listener)
        echo(server, BLOCK)
        server.close()
    assert listener.refused == {"payload": 3}


def test_a_place_without_memory_is_refused():
    with running(Adder(1), 1) as listener, Peer(listener.port) as peer:
        header = protocol.RequestHeader(0, Load(bucket=0), "uint8", BLOCK)
        header.place = (0, BLOCK)
        peer.send(header)
        assert "no memory is shared" in peer.receive().message.reason
    assert listener.refused == {"payload": 1}
    with pytest.raises(ProtocolError):
        WorkerEnd().lend((0, BLOCK))


# ---- where memory cannot be shared ----


@pytest.mark.parametrize(
    "reason", ["switched off", "no such call", "forbidden", "no room", "another user"]
)
def test_payloads_are_frames_where_memory_cannot_be_shared(frames, monkeypatch, reason):
    def forbidden(*_):
        raise PermissionError("not in this sandbox")

    before = held()
    if reason == "switched off":
        monkeypatch.setenv(shared_memory.SWITCH, "0")
    elif reason == "no such call":
        monkeypatch.delattr(os, "memfd_create")
    elif reason == "forbidden":
        monkeypatch.setattr(os, "memfd_create", forbidden)
    elif reason == "no room":
        monkeypatch.setattr(os, "ftruncate", forbidden)
    else:  # what is under /proc cannot be opened
        monkeypatch.setattr(os, "getpid", lambda: 1 << 30)
    with running(Adder(1), 1) as listener:
        server = connect(listener)
        echo(server, BLOCK)
        assert held() == before
        server.close()
    assert frames == [BLOCK] * 2
    assert not listener.refused


def test_replies_are_frames_to_a_worker_that_cannot_open_the_servers_memory(
    frames, monkeypatch
):
    opens = WorkerEnd.open

    def open_another(end, memory):
        memory.descriptor = 1 << 20
        opens(end, memory)

    monkeypatch.setattr(WorkerEnd, "open", open_another)
    with running(Adder(1), 1) as listener:
        server = connect(listener)
        echo(server, BLOCK)
        server.close()
    assert frames == [BLOCK]


def test_a_server_under_another_address_is_of_another_machine(frames, monkeypatch):
    """As far as anybody knows: a network that is emulated is not passed by."""

    class Elsewhere(socket.socket):
        def getpeername(self):
            return ("192.0.2.1", 1)

    connected = socket.create_connection

    def create_connection(*arguments):
        one = connected(*arguments)
        one.setblocking(True)
        return Elsewhere(fileno=one.detach())

    monkeypatch.setattr(socket, "create_connection", create_connection)
    with running(Adder(1), 1) as listener:
        server = connect(listener)
        echo(server, BLOCK)
        server.close()
    assert frames == [BLOCK] * 2


SEALS = shared_memory._seals()


@pytest.mark.parametrize(
    ("size", "seals", "nonce"),
    [
        (FILE - 1, SEALS, b"n" * 16),
        (FILE, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, b"n" * 16),
        (FILE, SEALS, b"m" * 16),
    ],
    ids=["another size", "could shrink", "another nonce"],
)
def test_memory_that_is_not_taken(size, seals, nonce):
    def share(size, seals, nonce):
        descriptor = os.memfd_create("paceline test", os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            os.pwrite(descriptor, nonce, 0)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            offer = protocol.Memory(os.getpid(), descriptor, b"n" * 16)
            return ServerMemory().share(offer).memory
        finally:
            os.close(descriptor)

    assert share(FILE, SEALS, b"n" * 16) is not None
    assert share(size, seals, nonce) is None


def test_descriptors_that_are_no_memory(tmp_path):
    read, write = os.pipe()
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(plain, FILE)
    memory = ServerMemory()
    with socket.socket() as peer, open("/dev/null", "r+b") as device:
        for number in (read, write, plain, peer.fileno(), device.fileno(), 1 << 20, -1):
            offer = protocol.Memory(os.getpid(), number, bytes(16))
            assert memory.share(offer).memory is None, number
    for process in (0, -1, 1 << 60):
        assert memory.share(protocol.Memory(process, 0, bytes(16))).memory is None
    for descriptor in (read, write, plain):
        os.close(descriptor)


# ---- what is left ----


def test_memory_is_gone_with_its_ends(frames):
    maps, descriptors = held()
    with running(Adder(2), 2) as listener:
        servers = [connect(listener, worker) for worker in range(2)]
        for server in servers:
            echo(server, BLOCK)
        # In one process: each worker's own and the server's, at both ends but for the server's own.
        assert held() == (maps + 2 + 2 + 2 + 1, descriptors + 1)
        for server in servers:
            server.close()
    del listener, server, servers
    assert held() == (maps, descriptors)
    assert not frames


def test_a_lost_worker_comes_back_with_memory_of_its_own(frames):
    before = held()
    adder = Adder(1)
    with running(adder, 1) as listener:
        first = connect(listener)
        echo(first, BLOCK)
        with_one = held()
        first.request(
            Pull(bucket=0), into=torch.zeros(BLOCK // 4)
        ).channel.socket.poll()
        first.part(well=False)  # before it has read the answer
        second = connect(listener, incarnation=1)
        assert torch.equal(pull(second, 0, BLOCK), values(BLOCK)), "of the first one"
        echo(second, MEMORY)
        assert held() == with_one
        second.close()
    del listener, first, second, adder
    assert not frames
    assert held() == before


def test_a_server_that_is_started_again_has_new_memory(frames):
    before = held()
    with running(Adder(1), 1) as listener:
        first = connect(listener)
        echo(first, BLOCK)
    with running(Adder(1), 1, port=listener.port) as listener:
        second = connect(listener)
        echo(second, MEMORY)
        second.close()
    first.close()
    del listener, first, second
    assert not frames
    assert held() == before


def test_what_a_killed_worker_has_sent_stays():
    adder = Adder(2)
    with running(adder, 2) as listener:
        server = connect(listener)
        with ended(child("work_as_a_child()", str(listener.port))) as worker:
            assert worker.stdout.readline() == "ready\n"
            worker.send_signal(signal.SIGKILL)
            assert adder.news.wait(SECONDS)
        got = torch.zeros(1 << 16)
        server.request(Pull(bucket=0), into=got).wait()
        assert torch.equal(got, torch.ones(1 << 16))
        echo(server, MEMORY)
        server.close()
