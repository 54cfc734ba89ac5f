"""Payloads between processes of one machine: what arrives, and what stands in the way."""

import contextlib
import fcntl
import gc
import os
import socket

import pytest
import torch

from paceline.interfaces.server_messages import Done, Load, Parameters, Pull, Reduce
from paceline.transport import payloads, protocol, shared_memory
from paceline.transport.protocol import RefusalError
from paceline.transport.shared_memory import (
    ANSWERS,
    PUSHES,
    Answers,
    Region,
    ServerEnd,
    WorkerEnd,
)
from tests.support.server_jobs import (
    SECONDS,
    Adder,
    Busy,
    Peer,
    connect,
    running,
    time_limit,
)

CHUNK = protocol.CHUNK_BYTES


@pytest.fixture(autouse=True)
def _limit():
    with time_limit():
        yield


class Ends:
    """Of a server, and of each of its workers, in one process."""

    def __init__(self, workers=1):
        self.region = Region.make(ANSWERS)
        self.answers = Answers(self.region)
        self.workers, self.servers = [], []
        for _ in range(workers):
            with contextlib.closing(Region.make(PUSHES)) as own:
                theirs = Region.open(own.place, PUSHES)
            self.servers.append(ServerEnd(theirs, self.answers))
            answers = Region.open(self.region.place, ANSWERS)
            self.workers.append(WorkerEnd(own, answers))

    def read(self):
        for server in self.servers:
            server.reads = True


@pytest.fixture
def ends():
    ends = Ends()
    with contextlib.closing(ends.region):
        ends.read()
        yield ends.workers[0], ends.servers[0]


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
        slots = [sender.put(chunk, 0, chunk) for chunk in sent]
        assert slots == [0, 1, 2]
        for slot, chunk in zip(slots, sent, strict=True):
            got = torch.zeros_like(chunk)
            receiver.take(slot, got)
            assert torch.equal(got, chunk)


@pytest.mark.parametrize("way", ["pushes", "answers"])
def test_a_slot_is_used_again_when_it_was_freed_and_not_before(ends, way):
    sender, receiver = ends if way == "pushes" else ends[::-1]
    count = PUSHES if way == "pushes" else ANSWERS

    def put():
        return sender.put(values(8), 0, values(8))

    assert [put() for _ in range(count)] == list(range(count))
    assert put() is None
    assert receiver.put(values(8), 0, values(8)) == 0  # the other way is its own
    receiver.free(count - 1)
    receiver.free(2)
    assert sorted(put() for _ in range(2)) == [2, count - 1]
    assert put() is None


@pytest.mark.parametrize("slot", [-1, PUSHES, 1 << 40])
def test_slots_that_are_none(ends, slot):
    with pytest.raises(RefusalError, match="slot"):
        ends[1].take(slot, values(8))
    ends[1].free(slot)


def test_what_several_are_answered_at_once_is_copied_once():
    ends = Ends(workers=3)
    ends.read()
    payload = values(2 * CHUNK)
    halves = {0: payload[:CHUNK], CHUNK: payload[CHUNK:]}
    for server in ends.servers:
        slots = [server.put(payload, start, half) for start, half in halves.items()]
        assert slots == [0, 1]
    got = torch.zeros(CHUNK, dtype=torch.uint8)
    for n, worker in enumerate(ends.workers):
        assert ends.servers[0].put(values(1), 0, values(1)) == 2 + n  # 0 is in use
        worker.take(0, got)
        assert torch.equal(got, halves[0])
        worker.free(0)
    assert ends.servers[0].put(values(1), 0, values(1)) == 5  # 0 is still of this batch
    ends.answers.batch_ended()
    payload.zero_()
    assert ends.servers[0].put(payload, 0, payload[:CHUNK]) == 0  # copied again
    ends.workers[0].take(0, got)
    assert not got.any()
    ends.region.close()


def test_an_answer_that_one_has_twice_is_in_two_slots():
    ends = Ends(workers=2)
    ends.read()
    payload = values(8)
    first, second = (ends.servers[0].put(payload, 0, payload) for _ in range(2))
    assert first != second
    assert ends.servers[1].put(payload, 0, payload) == second
    ends.region.close()


def test_a_batch_larger_than_the_memory_uses_slots_that_were_read():
    ends = Ends(workers=2)
    ends.read()
    (one, other), (reader, _) = ends.servers, ends.workers
    payload = values(ANSWERS * 8)
    for start in range(0, ANSWERS * 8, 8):
        assert one.put(payload, start, payload[start : start + 8]) is not None
    more = values(8) + 1
    assert one.put(more, 0, more) is None
    reader.free(3)
    assert one.put(more, 0, more) == 3
    # What was there for the other one has to be copied for it again, or travels.
    assert other.put(payload, 24, payload[24:32]) is None
    reader.free(0)
    assert other.put(payload, 24, payload[24:32]) == 0
    ends.region.close()


def test_a_worker_that_could_not_open_it_gets_nothing_in_the_servers_memory():
    ends = Ends()
    assert ends.servers[0].put(values(8), 0, values(8)) is None
    ends.read()
    assert ends.servers[0].put(values(8), 0, values(8)) == 0
    ends.region.close()


def test_memory_is_gone_with_its_ends():
    gc.collect()  # what tests before this one have left goes now, and not meanwhile
    before = descriptors_of_memory()
    ends = Ends(workers=2)
    # The server's own: workers, however many, keep none open, at either end.
    assert len(descriptors_of_memory()) == len(before) + 1
    ends.region.close()
    while ends.servers:  # as a shell does when a worker has left
        ends.servers.pop().close()
    del ends
    assert descriptors_of_memory() == before


# ---- what is no memory of a worker's ----


@contextlib.contextmanager
def file(size, seals, nonce=b"n" * shared_memory.NONCE_BYTES):
    descriptor = os.memfd_create("paceline test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, nonce, 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield protocol.Memory(os.getpid(), descriptor, b"n" * shared_memory.NONCE_BYTES)
    finally:
        os.close(descriptor)


SIZE = shared_memory._size(PUSHES)
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
    with file(SIZE, SEALS) as place:
        assert Region.open(place, PUSHES) is not None
    with file(size, seals, nonce) as place:
        assert Region.open(place, PUSHES) is None


def test_descriptors_that_are_no_memory(tmp_path):
    read, write = os.pipe()
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(plain, SIZE)
    with socket.socket() as peer, open("/dev/null", "r+b") as device:
        for number in (read, write, plain, peer.fileno(), device.fileno(), 1 << 20, -1):
            place = protocol.Memory(os.getpid(), number, bytes(16))
            assert Region.open(place, PUSHES) is None, number
    for process in (0, -1, 1 << 60):
        assert Region.open(protocol.Memory(process, 0, bytes(16)), PUSHES) is None
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
    "reason", ["switched off", "no such call", "forbidden", "no room", "else"]
)
def test_they_go_through_sockets_where_memory_cannot_be_shared(
    frames, monkeypatch, reason
):
    before = len(descriptors_of_memory())
    if reason == "switched off":
        monkeypatch.setenv(shared_memory.SWITCH, "0")
    elif reason == "no such call":
        monkeypatch.delattr(os, "memfd_create")
    elif reason == "forbidden":

        def memfd_create(*_):
            raise PermissionError("not in this sandbox")

        monkeypatch.setattr(os, "memfd_create", memfd_create)
    elif reason == "no room":

        def ftruncate(*_):
            raise OSError("a limit of this process")

        monkeypatch.setattr(os, "ftruncate", ftruncate)
    else:  # another user's process: what is under /proc is not to be opened
        monkeypatch.setattr(os, "getpid", lambda: 1 << 30)
    with running(Adder(1), 1) as shell:
        server = connect(shell)
        echo(server, CHUNK + 4)
        server.close()
    assert frames == [CHUNK, 4] * 2
    assert not shell.refused
    assert len(descriptors_of_memory()) <= before


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
    busy = Busy(1)
    with running(busy, 1) as shell:
        server = connect(shell)
        sent = torch.arange((PUSHES + 5) * CHUNK // 4).float()
        server.request(Load(bucket=1), torch.ones(1))
        loading = server.request(Load(bucket=0), sent)
        busy.may_go_on.set()
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
        for _ in range(PUSHES):
            echo(server, 4 * CHUNK)
        memory = server.shared
        assert not any(memory._sent)
        assert not any(memory._received)
        server.close()


def test_a_lost_worker_comes_back_with_memory_of_its_own(frames):
    before = len(descriptors_of_memory())
    with running(Adder(1), 1) as shell:
        first = connect(shell)
        echo(first, CHUNK)
        with_one = len(descriptors_of_memory())
        first._let_go(0.0)
        second = connect(shell, incarnation=1)
        echo(second, CHUNK)
        assert len(descriptors_of_memory()) == with_one
        second.close()
    assert not frames
    assert len(descriptors_of_memory()) == before


def test_workers_keep_no_descriptor_of_memory_open(frames):
    before = len(descriptors_of_memory())
    with running(Adder(3), 3) as shell:
        ends = []
        for worker in range(3):
            ends.append(connect(shell, worker))
            echo(ends[-1], CHUNK)
            assert len(descriptors_of_memory()) == before + 1, "the server's own"
        for end in ends:
            end.close()
    assert not frames
    assert len(descriptors_of_memory()) == before


def test_a_slot_without_memory_is_refused():
    with running(Adder(1), 1) as shell, Peer(shell.port) as peer:
        peer.say(protocol.Reads())  # what was not offered
        peer.say(protocol.Share(protocol.Memory(os.getpid(), 1 << 20, bytes(16))))
        assert peer.hear() == protocol.Shared(None)
        peer.say(protocol.Begin(0, 0, Load(bucket=0), "uint8", 1, slot=0))
        assert "no memory is shared" in peer.hear().message.reason
    assert shell.refused == {"payload": 1}


def test_memory_is_taken_once():
    adder = Adder(1)
    with running(adder, 1) as shell, Peer(shell.port) as peer:
        with contextlib.closing(Region.make(PUSHES)) as own:
            peer.say(protocol.Share(own.place))
            assert Region.open(peer.hear().memory, ANSWERS) is not None
            peer.say(protocol.Share(own.place))
            assert isinstance(peer.hear(), protocol.Rejected)
        assert adder.news.wait(SECONDS)  # it was taken for lost
    assert shell.refused == {"order": 1}


def test_workers_of_one_machine_and_others_get_the_same_answers(frames, monkeypatch):
    with running(Adder(3), 3) as shell:
        near = [connect(shell, worker) for worker in range(2)]
        monkeypatch.setenv(shared_memory.SWITCH, "0")
        servers = [*near, connect(shell, 2)]
        for number in range(3):
            got = [torch.full((CHUNK,), float(number + rank)) for rank in range(3)]
            receptions = [
                server.request(
                    Reduce(channel="", number=number, operation="sum"), own, into=own
                )
                for server, own in zip(servers, got, strict=True)
            ]
            for reception, own in zip(receptions, got, strict=True):
                reception.wait()
                assert torch.equal(own, torch.full((CHUNK,), 3.0 * number + 3))
        for server in servers:
            server.close()
    assert frames == [CHUNK] * len(frames)  # the third one's, both ways
    assert len(frames) >= 3 * 2 * 4
