"""Payloads between processes of one machine: what arrives, and what stands in the way."""

import contextlib
import fcntl
import os
import socket
import threading

import pytest
import torch

from paceline.messages import Done, Load, Parameters, Pull
from paceline.server import payloads, shared_memory, wire
from paceline.server.shared_memory import SLOTS, accepted, offered
from paceline.server.wire import RefusalError
from tests.server import SECONDS, Adder, Peer, connect, running, time_limit

CHUNK = wire.CHUNK_BYTES


@pytest.fixture(autouse=True)
def _limit():
    with time_limit():
        yield


@pytest.fixture
def ends():
    with offered() as (offer, worker):
        server = accepted(offer)
    assert server is not None
    return worker, server


def values(size):
    return (torch.arange(size) % 251).to(torch.uint8)


def descriptors_of_memory():
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "paceline" in os.readlink(f"/proc/self/fd/{name}"):
                found.append(name)
    return found


def test_what_is_put_at_one_end_is_taken_at_the_other(ends):
    for sender, receiver in (ends, ends[::-1]):
        sent = [values(size) + size for size in (1, 4095, CHUNK)]
        slots = [sender.put(chunk) for chunk in sent]
        assert slots == [0, 1, 2]
        for slot, chunk in zip(slots, sent, strict=True):
            got = torch.zeros_like(chunk)
            receiver.take(slot, got)
            assert torch.equal(got, chunk)


def test_a_slot_is_used_again_when_it_was_freed_and_not_before(ends):
    worker, server = ends
    assert [worker.put(values(8)) for _ in range(SLOTS)] == list(range(SLOTS))
    assert worker.put(values(8)) is None
    assert server.put(values(8)) == 0  # the other direction is its own
    server.free(SLOTS - 1)
    server.free(2)
    assert [worker.put(values(8)) for _ in range(3)] == [2, SLOTS - 1, None]


@pytest.mark.parametrize("slot", [-1, SLOTS, 1 << 40])
def test_slots_that_are_none(ends, slot):
    with pytest.raises(RefusalError, match="slot"):
        ends[1].take(slot, values(8))
    ends[1].free(slot)


def test_the_memory_is_gone_with_its_ends():
    before = descriptors_of_memory()
    with offered() as (offer, worker):
        server = accepted(offer)
        assert descriptors_of_memory() != before
    assert worker.put(values(8)) == 0
    # Python's own copies of the descriptor, one at each end.
    assert len(descriptors_of_memory()) == len(before) + 2
    del worker, server
    assert descriptors_of_memory() == before


# ---- what is no memory of a worker's ----


@contextlib.contextmanager
def file(size, seals, nonce=b"n" * shared_memory.NONCE_BYTES):
    descriptor = os.memfd_create("paceline test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, nonce, 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield wire.Share(os.getpid(), descriptor, b"n" * shared_memory.NONCE_BYTES)
    finally:
        os.close(descriptor)


SIZE = shared_memory._BYTES
SEALS = shared_memory._seals()


@pytest.mark.parametrize(
    ("size", "seals", "nonce"),
    [
        (SIZE - 1, SEALS, b"n" * 16),
        (SIZE, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, b"n" * 16),
        (SIZE, SEALS, b"m" * 16),
    ],
    ids=["another size", "could shrink", "another nonce"],
)
def test_memory_that_is_not_taken(size, seals, nonce):
    with file(SIZE, SEALS) as offer:
        assert accepted(offer) is not None
    with file(size, seals, nonce) as offer:
        assert accepted(offer) is None


def test_descriptors_that_are_no_memory(tmp_path):
    read, write = os.pipe()
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(plain, SIZE)
    with socket.socket() as peer, open("/dev/null", "r+b") as device:
        for number in (read, write, plain, peer.fileno(), device.fileno(), 1 << 20, -1):
            offer = wire.Share(os.getpid(), number, bytes(16))
            assert accepted(offer) is None, number
    for process in (0, -1, 1 << 60):
        assert accepted(wire.Share(process, 0, bytes(16))) is None
    for descriptor in (read, write, plain):
        os.close(descriptor)


# ---- through shell and client ----


def echo(server, size):
    sent, got = torch.arange(size // 4).float(), torch.zeros(size // 4)
    assert server.request(Load(bucket=0), sent).wait() == Done()
    reply = server.request(Pull(bucket=0), into=got).wait()
    assert reply == Parameters(bucket=0, version=0)
    assert torch.equal(got, sent)


@pytest.fixture
def frames(monkeypatch):
    """Sizes of the chunks that went through sockets."""
    seen = []
    messages = payloads.messages

    def noting(*arguments):
        for header, chunk in messages(*arguments):
            if chunk is not None:
                seen.append(len(chunk))
            yield header, chunk

    monkeypatch.setattr(payloads, "messages", noting)
    return seen


def test_payloads_of_one_machine_pass_no_socket(frames):
    with running(Adder(1), 1) as shell:
        server = connect(shell)
        for size in (4, CHUNK, 3 * CHUNK + 12):
            echo(server, size)
        server.close()
    assert not frames
    assert not shell.refused


@pytest.mark.parametrize(
    "reason", ["switched off", "no such call", "forbidden", "else"]
)
def test_they_go_through_sockets_where_memory_cannot_be_shared(
    frames, monkeypatch, reason
):
    if reason == "switched off":
        monkeypatch.setenv(shared_memory.SWITCH, "0")
    elif reason == "no such call":
        monkeypatch.delattr(os, "memfd_create")
    elif reason == "forbidden":

        def memfd_create(*_):
            raise PermissionError("not in this sandbox")

        monkeypatch.setattr(os, "memfd_create", memfd_create)
    else:  # another user's process: what is under /proc is not to be opened
        monkeypatch.setattr(os, "getpid", lambda: 1 << 30)
    with running(Adder(1), 1) as shell:
        server = connect(shell)
        echo(server, CHUNK + 4)
        server.close()
    assert frames == [CHUNK, 4] * 2
    assert not shell.refused


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
    with running(Adder(1), 1) as shell:
        server = connect(shell)
        echo(server, 8)
        server.close()
    assert frames == [8, 8]


def test_more_chunks_than_slots(frames):
    """Nobody waits for a slot: this server reads nothing while the worker sends."""
    may_go_on = threading.Event()

    class Busy(Adder):
        def on_message(self, *arguments):
            assert may_go_on.wait(SECONDS)
            return super().on_message(*arguments)

    with running(Busy(1), 1) as shell:
        server = connect(shell)
        sent = torch.arange((SLOTS + 5) * CHUNK // 4).float()
        server.request(Load(bucket=1), torch.ones(1))
        loading = server.request(Load(bucket=0), sent)
        may_go_on.set()
        assert loading.wait() == Done()
        got = torch.zeros_like(sent)
        server.request(Pull(bucket=0), into=got).wait()
        server.close()
    assert torch.equal(got, sent)
    # One slot may still have held the first request's.
    assert frames[:5] == [CHUNK] * 5


def test_slots_of_what_was_refused_are_free_again(frames):
    limit = 4 * CHUNK
    with running(Adder(1), 1, max_payload_bytes=limit) as shell:
        server = connect(shell)
        with pytest.raises(Exception, match="at most"):
            server.request(Load(bucket=0), torch.zeros(limit // 4 + 1)).wait()
        echo(server, 4 * CHUNK)
        with pytest.raises(Exception, match="handed over"):  # the other way
            server.request(Pull(bucket=0), into=torch.zeros(8)).wait()
        for _ in range(SLOTS):
            echo(server, 4 * CHUNK)
        memory = server.shared
        assert list(memory._sent) == list(memory._received) == [0] * SLOTS
        server.close()


def test_a_lost_worker_comes_back_with_memory_of_its_own(frames):
    before = len(descriptors_of_memory())
    with running(Adder(1), 1) as shell:
        first = connect(shell)
        echo(first, CHUNK)
        first._let_go(0.0)
        second = connect(shell, incarnation=1)
        echo(second, CHUNK)
        assert len(descriptors_of_memory()) == before + 2
        second.close()
    assert not frames
    assert len(descriptors_of_memory()) == before


def test_a_slot_without_memory_is_refused():
    with running(Adder(1), 1) as shell, Peer(shell.port) as peer:
        peer.say(wire.Share(os.getpid(), 1 << 20, bytes(16)))
        assert peer.hear() == wire.Shared(False)
        peer.say(wire.Begin(0, 0, Load(bucket=0), "uint8", 1, slot=0))
        assert "no memory is shared" in peer.hear().message.reason
    assert shell.refused == {"payload": 1}


def test_memory_is_taken_once():
    adder = Adder(1)
    with running(adder, 1) as shell, Peer(shell.port) as peer:
        with offered() as (offer, _):
            peer.say(offer)
            assert peer.hear() == wire.Shared(True)
            peer.say(offer)
            assert isinstance(peer.hear(), wire.Rejected)
        assert adder.news.wait(SECONDS)  # it was taken for lost
    assert shell.refused == {"order": 1}
