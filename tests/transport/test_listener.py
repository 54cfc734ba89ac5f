"""The host and its client, over real sockets: what arrives, who is lost, what is left."""

import contextlib
import gc
import os
import signal
import socket
import threading
import time

import pytest
import torch
import zmq

from paceline.errors import PeerLostError, UsageError
from paceline.interfaces.server_messages import (
    DTYPES,
    PROTOCOL,
    Done,
    Join,
    Leave,
    Load,
    Parameters,
    Pull,
    PullState,
    Reduce,
    Reduced,
    Rejected,
)
from paceline.parameter_server.process.services import make_parameter_server
from paceline.records import RecordsInMemory, StepRecorder
from paceline.timeouts import timeouts
from paceline.transport import connection, protocol
from paceline.transport.connection import Channel
from paceline.transport.listener import (
    REFUSALS_LOGGED,
    ControlEnded,
    ControlLine,
    ServerListener,
)
from paceline.transport.security import PLAIN, from_secret
from tests.support.server_jobs import (
    SECONDS,
    TOKEN,
    Adder,
    Line,
    Peer,
    child,
    connect,
    ended,
    running,
    time_limit,
)


@pytest.fixture(autouse=True)
def _limit():
    with time_limit():
        yield


def values(count, dtype):
    return (torch.arange(count) % 100).to(dtype)


FRAME = 1 << 20
SIZES = (
    0,
    1,
    3,
    protocol.SMALL_BYTES - 4,
    protocol.SMALL_BYTES,
    FRAME,
    FRAME + 4,
    3 * FRAME + 12,
)


@pytest.mark.parametrize(
    "security", [PLAIN, from_secret("a" * 16)], ids=["plain", "CURVE"]
)
def test_what_was_sent_comes_back(security, monkeypatch):
    monkeypatch.setattr(protocol, "FRAME_BYTES", FRAME)
    monkeypatch.setattr(protocol, "LARGEST_ON_THE_WIRE", FRAME + 256)
    with running(Adder(1), 1, security=security) as host:
        server = connect(host, security=security)
        for dtype in DTYPES.values():
            for size in SIZES if dtype == torch.float32 else (3 * FRAME,):
                sent = values(size // dtype.itemsize, dtype)
                got = torch.zeros_like(sent)
                assert server.request(Load(bucket=0), sent).wait() == Done()
                reply = server.request(Pull(bucket=0), into=got).wait()
                assert reply == Parameters(bucket=0, version=0)
                assert torch.equal(got, sent), dtype
        server.close()
    assert not host.refused


def test_sums_come_to_all_workers_in_the_buffers_that_they_handed_over():
    with running(Adder(2), 2) as host:
        servers = [connect(host, worker) for worker in range(2)]
        sizes = [5, FRAME, 1000, 2 * FRAME + 1]
        buffers = [[torch.full((size,), 1.0 + w) for size in sizes] for w in range(2)]
        pending_replies = [
            server.request(
                Reduce(channel="", number=i, operation="sum"),
                buffer,
                into=buffer,
                channel="second" if i % 2 else "",
            )
            for server, its in zip(servers, buffers, strict=True)
            for i, buffer in enumerate(its)
        ]
        for pending_reply in reversed(pending_replies):
            pending_reply.wait()
            pending_reply.wait()  # a second call returns at once
        for its in buffers:
            assert all(torch.equal(b, torch.full_like(b, 3.0)) for b in its)
        for server in servers:
            server.close()
        host.thread.join(SECONDS)
        assert not host.thread.is_alive()  # all have said goodbye


def test_more_requests_than_a_channel_may_have_wait_their_turn():
    adder = Adder(2)
    with running(adder, 2) as host:
        server, other = connect(host), connect(host, 1)
        count = protocol.MOST_UNANSWERED + 300
        pending_replies = [
            server.request(Reduce(channel="", number=i, operation="sum"), torch.ones(1))
            for i in range(count)
        ]
        assert len(server._channels[""].queue) == 300
        for i, pending_reply in enumerate(pending_replies):
            message = Reduce(channel="", number=i, operation="sum")
            other.request(message, torch.ones(1)).wait()
            pending_reply.wait()  # sends on what was kept
        assert [s.number for s in adder.taken if s.worker == 0] == list(range(count))
        for one in (server, other):
            one.close()
    assert not host.refused


def test_what_the_server_refuses_is_a_usage_error():
    with running(Adder(1), 1) as host:
        server = connect(host)
        refused = server.request(Leave())
        for _ in range(2):
            with pytest.raises(UsageError, match=r"server 0 at .*: this server only"):
                refused.wait()
        assert server.request(Load(bucket=0), torch.ones(2)).wait() == Done()
        with pytest.raises(UsageError, match=r"has 2 elements of float32, .* 1 of"):
            server.request(Pull(bucket=0), into=torch.zeros(1)).wait()
        assert server.request(Pull(bucket=0)).wait() == Parameters(bucket=0, version=0)
        with pytest.raises(UsageError, match="flat contiguous"):
            server.request(Load(bucket=0), torch.ones(2, 2))
        with pytest.raises(UsageError, match="expected one of"):
            server.request(Load(bucket=0), torch.ones(2, dtype=torch.bool))
        server.close()
        with pytest.raises(UsageError, match="close"):
            server.request(Leave())
        server.close()  # twice is no harm


def test_bytes_and_waits_are_counted():
    kept = RecordsInMemory([], [])
    recorder = StepRecorder(0, time.perf_counter, kept)
    with running(Adder(1), 1) as host:
        server = connect(host, recorder=recorder)
        recorder.begin("test")
        server.request(Load(bucket=0), torch.ones(1000)).wait()
        server.request(Pull(bucket=0), into=torch.ones(1000)).wait()
        recorder.step()
        server.close()
    assert recorder.steps[0].bytes_sent == 4000 + 2 * protocol.HEADER_BYTES
    names = [span.name for span in kept.spans]
    assert names == ["server", "server", "step 1"]


def test_the_servers_deadline_is_kept():
    adder = Adder(1)
    adder.deadline = time.monotonic() + 0.05
    with running(adder, 1):
        assert adder.news.wait(SECONDS)
    assert len(adder.timers) == 1


def test_a_fault_of_the_server_itself_ends_its_process_and_everybody_knows():
    class Faulty(Adder):
        def on_request(self, *_):
            raise RuntimeError("my fault")

    def job():
        with running(Faulty(1), 1) as host:
            server = connect(host)
            with pytest.raises(PeerLostError, match="server 0 at 127"):
                server.request(Leave()).wait()
            server.close()

    with pytest.raises(AssertionError, match="my fault"):
        job()


def test_an_end_that_is_dropped_without_a_goodbye_is_let_go():
    adder = Adder(1)
    with running(adder, 1) as host:
        server = connect(host)
        server.request(Load(bucket=0), torch.ones(1)).wait()
        del server
        gc.collect()  # would wait for ever for sockets that are open
        assert adder.news.wait(SECONDS)
    assert adder.lost == [(0, 0)]


# ---- lost peers ----


def test_a_killed_worker_is_lost():
    adder = Adder(2)
    with running(adder, 2) as host:
        with ended(child("work_as_a_child()", str(host.port))) as worker:
            assert worker.stdout.readline() == "ready\n"
            assert adder.silent.wait(SECONDS)
            worker.send_signal(signal.SIGKILL)
            assert adder.news.wait(SECONDS)
        assert adder.lost == [(1, 0)]
        again = connect(host, 1, incarnation=1)
        again.request(Load(bucket=0), torch.ones(1)).wait()
        again.close()
    assert adder.lost == [(1, 0)]


@pytest.mark.slow
def test_a_killed_server_is_noticed_by_everything_that_waits():
    with ended(child("serve_as_a_child()")) as process:
        port = int(process.stdout.readline())
        server = connection.ServerConnection(
            "server 7", "127.0.0.1", port, worker=0, token=TOKEN
        )
        waiting = [server.request(PullState(bucket=0), channel=c) for c in ("", "x")]
        waiting.append(server.request(Leave()))  # it dies of this
        for pending_reply in waiting:
            with pytest.raises(PeerLostError, match=f"server 7 at 127.0.0.1:{port}"):
                pending_reply.wait()
        with pytest.raises(PeerLostError, match="server 7"):
            server.request(Leave())
        server.close()


def test_a_network_that_is_cut_is_a_lost_peer_and_not_connected_again():
    """What is sent after the cut must not come to the server from a stranger, which it refuses:
    that was no fault of the script's."""
    adder = Adder(1)
    with running(adder, 1) as host, Line(host.port) as line:
        server = connect(host, port=line.port)
        server.request(Load(bucket=0), torch.ones(1)).wait()
        made = line.made
        line.cut()
        assert not line.again.wait(0.5)
        with pytest.raises(PeerLostError, match="server 0 at 127"):
            server.request(Pull(bucket=0)).wait()
        with pytest.raises(PeerLostError):
            server.request(Pull(bucket=0))
        server.close()
        assert line.made == made
        assert adder.news.wait(SECONDS)
        assert not host.refused


def test_what_came_before_a_cut_is_read():
    class Last(Adder):
        def on_request(self, sender, *rest):
            self.news.set()
            return super().on_request(sender, *rest)

    last = Last(1)
    with running(last, 1) as host, Line(host.port) as line:
        server = connect(host, port=line.port)
        loading = server.request(Load(bucket=0), torch.ones(1))
        assert last.news.wait(SECONDS)
        while not server._channels[""].socket.poll(1000):
            pass  # the answer is here, and not read
        line.cut()
        while not server._channels[""].monitor.poll(1000):
            pass
        assert loading.wait() == Done()
        server.close()


def test_a_server_that_listens_later_is_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    made = []
    first = threading.Thread(
        target=lambda: made.append(
            connection.ServerConnection(
                "server 0", "127.0.0.1", port, worker=0, token=TOKEN
            )
        )
    )
    first.start()
    with running(Adder(1), 1, port=port, security=None):
        first.join(SECONDS)
        [server] = made
        assert server.request(Load(bucket=0), torch.ones(1)).wait() == Done()
        server.close()


def test_a_worker_that_says_goodbye_is_not_lost():
    adder = Adder(2)
    with running(adder, 2) as host:
        first, second = connect(host, 0), connect(host, 1)
        first.request(Load(bucket=0), torch.ones(1), channel="other").wait()
        first.close()
        second.request(Load(bucket=0), torch.ones(1)).wait()
        assert host.thread.is_alive()
        second.close()
        host.thread.join(SECONDS)
        assert not host.thread.is_alive()
    assert not adder.lost


def test_a_goodbye_of_one_who_has_joined_and_not_left_is_a_loss():
    adder = Adder(2)
    with running(adder, 2) as host:
        first, second = connect(host, 0), connect(host, 1)
        for worker in (first, second):
            worker.request(Join(options=""))
        first.request(Leave())
        first.close()
        second.close()
        host.thread.join(SECONDS)
        assert not host.thread.is_alive()
    assert adder.lost == [(1, 0)]


def test_who_waits_for_one_who_breaks_off_goes_on():
    machine = make_parameter_server(2, "server")
    with running(machine, 2) as host:
        first, second = connect(host, 0), connect(host, 1)
        for worker in (first, second):
            worker.request(Join(options="")).wait()
        waiting = first.request(
            Reduce(channel="", number=0, operation="sum"), torch.ones(4)
        )
        second.close()
        assert isinstance(waiting.wait(), Reduced)
        first.request(Leave()).wait()
        first.close()
    assert machine.counts["workers lost"] == 1


def test_a_newer_incarnation_replaces_an_older_one():
    adder = Adder(1)
    with running(adder, 1) as host:
        old = connect(host, incarnation=3)
        waiting = old.request(PullState(bucket=0))
        assert adder.silent.wait(SECONDS)
        new = connect(host, incarnation=4)
        with pytest.raises(PeerLostError):
            waiting.wait()
        with pytest.raises(UsageError, match="larger"):
            connect(host, incarnation=4)
        assert adder.lost == [(0, 3)]
        new.request(Load(bucket=0), torch.ones(1)).wait()
        assert adder.taken[-1].incarnation == 4
        new.close()
        old.close()


def test_waiting_can_be_interrupted():
    adder = Adder(1)
    # Shells start what runs in the background with interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with running(adder, 1) as host:
        server = connect(host)
        pending_reply = server.request(PullState(bucket=0))
        assert adder.silent.wait(SECONDS)
        interrupt = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT))

        def wait():
            interrupt.start()
            pending_reply.wait()

        try:
            with pytest.raises(KeyboardInterrupt):
                wait()
        finally:
            signal.signal(signal.SIGINT, before)
        interrupt.join()
        assert server.request(Load(bucket=0), torch.ones(1)).wait() == Done()
        server.close()


# ---- connecting ----


def test_nobody_there(monkeypatch):
    monkeypatch.setattr(timeouts, "server_connect", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PeerLostError, match="did not answer"):
            connection.ServerConnection(
                "server 0", "127.0.0.1", port, worker=0, token=TOKEN
            )


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (PLAIN, from_secret("a" * 16)),
        (from_secret("a" * 16), PLAIN),
        (from_secret("a" * 16), from_secret("b" * 16)),
    ],
    ids=["plain to CURVE", "CURVE to plain", "another secret"],
)
def test_ends_that_are_not_protected_alike(here, there):
    with (
        running(Adder(1), 1, security=there) as host,
        pytest.raises((PeerLostError, UsageError), match="PACELINE_SECRET"),
    ):
        connect(host, security=here)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"token": "of another job"}, "token"),
        ({"worker": 1}, "no worker 1 in"),
        ({"worker": -1}, "no worker -1 in"),
        ({"incarnation": -1}, "a larger one"),
    ],
)
def test_workers_that_are_not_wanted(changed, sentence):
    with running(Adder(1), 1) as host:
        with pytest.raises(UsageError, match=sentence):
            connect(host, **changed)
        connect(host).close()
    assert host.refused.total() == 1


def test_who_is_refused_before_it_has_said_hello_is_told_why(monkeypatch):
    """The connection is made by another thread, which may be faster."""
    send = Channel.send

    def send_late(channel, words):
        assert channel.monitor.poll(1000 * SECONDS)
        while channel.socket.poll(0, zmq.POLLOUT):
            pass  # its thread is about to let go of the connection
        send(channel, words)

    monkeypatch.setattr(Channel, "send", send_late)
    with (
        running(Adder(1), 1) as host,
        pytest.raises(UsageError, match=r"its token .* differs"),
    ):
        connect(host, token="of another job")


def test_addresses_that_cannot_be_bound():
    with running(Adder(1), 1) as host:
        for address, port in (("127.0.0.1", host.port), ("no such host.invalid", 0)):
            with (
                pytest.raises(UsageError, match="cannot listen at"),
                running(Adder(1), 1, address=address, port=port),
            ):
                pass
    with pytest.raises(UsageError, match="PACELINE_TRUSTED_NETWORK"):
        running(Adder(1), 1, address="0.0.0.0", security=None).__enter__()


def test_lines_of_who_runs_it_are_heard_whole():
    listener = ServerListener(workers=1, token=TOKEN, security=PLAIN)
    read, write = os.pipe()
    rest = {b"one": b"o\nthree\nfo", b"three": b"ur\n"}
    heard = []
    listener.watch_control(read)
    os.write(write, b"one\ntw")
    while ControlEnded() not in heard:
        for event in listener.poll():
            heard.append(event)
            if event == ControlLine(b"four"):
                os.close(write)
            elif event != ControlEnded():
                os.write(write, rest.get(event.line, b""))
    os.close(read)
    listener.close()
    lines = [ControlLine(line) for line in (b"one", b"two", b"three", b"four")]
    assert heard == [*lines, ControlEnded()]


def test_nothing_is_left_behind():
    def descriptors():
        return set(os.listdir("/proc/self/fd"))

    def once():
        with running(Adder(1), 1) as host:
            server = connect(host)
            server.request(Load(bucket=0), torch.ones(FRAME), channel="x").wait()
            server.close()

    once()  # pyzmq keeps one thread of its own from now on
    threads, before = threading.active_count(), len(descriptors())
    for _ in range(3):
        once()
    assert threading.active_count() == threads
    assert len(descriptors()) == before


# ---- what peers do wrong ----


def begin(number=0, dtype=None, elements=0):
    return protocol.RequestHeader(number, Load(bucket=0), dtype, elements)


ONE = begin(dtype="float32", elements=1)


@pytest.mark.parametrize(
    ("kind", "request_frames"),
    [
        ("dtype", (begin(dtype="qint8", elements=1), b"1234")),
        ("too large", (begin(dtype="float32", elements=2**40), b"1234")),
        ("payload", (begin(dtype="float32", elements=2), b"1234")),
        ("payload", (ONE,)),
        ("payload", (begin(), b"1234")),
        ("payload", (ONE, b"1234", b"")),
        ("payload", (begin(dtype="float32", elements=-1),)),
        ("payload", (begin(elements=1),)),
        ("payload", (ONE, b"12345")),
        ("payload", (ONE, b"12", b"34")),
    ],
)
def test_a_wrong_request_is_refused_and_the_next_is_taken(kind, request_frames):
    adder = Adder(1)
    with running(adder, 1) as host, Peer(host.port) as peer:
        peer.send(*request_frames)
        answer = peer.receive()
        assert answer.number == 0
        assert isinstance(answer.message, Rejected)
        assert host.refused == {kind: 1}
        peer.send(begin(1, "float32", 1), b"1234")
        assert peer.receive() == protocol.ReplyHeader(1, Done())


@pytest.mark.parametrize(
    "message",
    [protocol.Hello(PROTOCOL, TOKEN, 0, 1, ""), begin(1), begin(2**60), begin(-1)],
    ids=["a second hello", "too early", "far too early", "negative"],
)
def test_a_worker_that_breaks_the_protocol_is_dropped(message):
    adder = Adder(1)
    with running(adder, 1) as host, Peer(host.port) as peer:
        peer.send(message)
        while not isinstance(peer.receive(), protocol.Rejected):
            pass
        assert adder.news.wait(SECONDS)
        assert peer.liveness.recv(1) == b""
        assert adder.lost == [(0, 0)]
        assert host.refused == {"order": 1}
        connect(host, incarnation=1).close()


@pytest.mark.slow
def test_a_worker_that_does_not_take_its_answers_is_dropped():
    adder = Adder(1)
    largest = 256 << 10
    running_shell = running(adder, 1, max_payload_bytes=largest)
    with running_shell as host, Peer(host.port, queue=1) as peer:
        adder.buckets[0] = torch.zeros(largest, dtype=torch.uint8)
        for i in range(3 * protocol.MOST_UNANSWERED):
            peer.send(protocol.RequestHeader(i, Pull(bucket=0)))
        assert adder.news.wait(SECONDS)
        assert host.refused["unread"] == 1
        assert adder.lost == [(0, 0)]


@pytest.mark.parametrize(
    ("kind", "header"),
    [
        ("version", protocol.encode(protocol.Hello(PROTOCOL + 1, TOKEN, 0, 0, ""))),
        ("token", protocol.encode(protocol.Hello(PROTOCOL, "another", 0, 0, ""))),
        ("worker", protocol.encode(protocol.Hello(PROTOCOL, TOKEN, 1, 0, ""))),
        ("incarnation", protocol.encode(protocol.Hello(PROTOCOL, TOKEN, 0, 0, "x"))),
        ("stranger", protocol.encode(begin())),
        ("stranger", b""),
        ("stranger", b"x" * (protocol.HELLO_BYTES + 1)),
    ],
)
def test_strangers_are_answered_and_counted(kind, header):
    with running(Adder(1), 1) as host, Peer(host.port, known=False) as peer:
        peer.socket.send(header)
        assert isinstance(peer.receive(), protocol.Rejected)
        assert host.refused == {kind: 1}


def test_channels_have_a_limit():
    with running(Adder(1), 1) as host:
        server = connect(host)
        for i in range(protocol.CHANNELS - 1):
            server.request(Load(bucket=0), torch.ones(1), channel=str(i)).wait()
        with pytest.raises(UsageError, match="channel 'more'"):
            server.request(Leave(), channel="more")
        with Peer(host.port, known=False) as peer:
            peer.send(protocol.Hello(PROTOCOL, TOKEN, 0, 0, "more"))
            assert isinstance(peer.receive(), protocol.Rejected)
        server.close()


def test_a_wrong_ticket_is_shown_out():
    with running(Adder(1), 1) as host, Peer(host.port, known=False) as peer:
        peer.send(protocol.Hello(PROTOCOL, TOKEN, 0, 0, ""))
        address = "127.0.0.1", peer.receive().port
        for words in (b"a guess\n", b"x" * 1000, b"bye\n"):
            with socket.create_connection(address, SECONDS) as liveness:
                liveness.sendall(words)
                with contextlib.suppress(ConnectionResetError):
                    assert liveness.recv(1) == b""
        assert host.refused == {"liveness": 3}
        peer.send(begin())
        assert isinstance(peer.receive(), protocol.Rejected)  # not without its ticket


def test_messages_of_many_and_of_large_frames():
    with (
        running(Adder(2), 3) as host,
        Peer(host.port, 2) as peer,
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


def test_refusals_of_one_kind_are_logged_ten_times_and_hide_no_others(caplog):
    with running(Adder(2), 2) as host:
        for _ in range(REFUSALS_LOGGED + 5):
            with pytest.raises(UsageError, match="no worker 7"):
                connect(host, worker=7)
        with pytest.raises(UsageError, match="token"):
            connect(host, token="of\nanother job")
    lines = [line for line in caplog.messages if "no worker 7" in line]
    assert len(lines) == REFUSALS_LOGGED
    ends = [line.endswith("more of these are only counted") for line in lines]
    assert ends == [False] * (REFUSALS_LOGGED - 1) + [True]
    assert "does not know the job's token" in caplog.text
    assert all(line.isprintable() for line in caplog.messages)
