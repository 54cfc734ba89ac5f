"""The aggregator's port: who is let in, who is turned away, and what becomes of the others."""

import json
import socket
import threading

import msgspec
import numpy as np
import pytest

from paceline.collectives.in_network import server as module
from paceline.collectives.in_network.joining import JoinRing
from paceline.collectives.in_network.server import AggregatorServer
from paceline.collectives.in_network.topology import Group
from paceline.collectives.in_network.wire import (
    HEADER,
    VERSION,
    Kind,
    Registration,
    Terms,
    check_may_be_read,
)
from paceline.errors import PeerLostError, UsageError
from paceline.transport.security import TRUSTED
from tests.collectives.in_network.sums import (
    HOST,
    TOKEN,
    aggregators,
    job,
    ring,
    together,
    total,
    values_of,
)
from tests.support.hanging import SECONDS
from tests.support.processes import wait_until

TERMS = Terms(job="job", expected=(1,), window=2, chunk_bytes=1024)


@pytest.fixture
def server():
    with aggregators([0]) as servers:
        yield servers[0]


def connected(server):
    peer = socket.create_connection(server.address, SECONDS)
    peer.settimeout(SECONDS)
    return peer


def heard(peer):
    """The next frame's kind and words; None at the end."""
    head = exactly(peer, HEADER.size)
    if head is None:
        return None
    _, size, _, kind, _ = HEADER.unpack(head)
    return Kind(kind), exactly(peer, size)


def exactly(peer, size):
    data = b""
    while len(data) < size:
        try:
            got = peer.recv(size - len(data))
        except ConnectionResetError:
            return None
        if not got:
            return None
        data += got
    return data


def frame_of(kind, payload=b"", position=0, members=1):
    return HEADER.pack(position, len(payload), members, kind, 0) + payload


STRANGERS = {
    "words of others": b"GET / HTTP/1.1\r\nHost: aggregator\r\n\r\n",
    "a long frame": HEADER.pack(0, 1 << 30, 0, Kind.HELLO, 0),
    "no JSON": frame_of(Kind.HELLO, b"{"),
    "deep JSON": frame_of(Kind.HELLO, b"[" * 100_000),
    "no hello": frame_of(Kind.HELLO, b"{}"),
    "a contribution": frame_of(Kind.CONTRIBUTION, b"0123"),
    "half a number": frame_of(Kind.CONTRIBUTION, b"012"),
    "a sum": frame_of(Kind.SUM, b"0123"),
    "a goodbye": frame_of(Kind.GOODBYE),
    "a loss": frame_of(Kind.LOST, b"all is over"),
    "no such kind": frame_of(200),
}


@pytest.mark.parametrize("what", STRANGERS)
def test_strangers_are_turned_away_and_hold_nothing(server, what):
    peer = connected(server)
    kind, words = heard(peer)
    assert (kind, json.loads(words)["version"]) == (Kind.CHALLENGE, VERSION)
    peer.sendall(STRANGERS[what])
    assert heard(peer) is None
    peer.close()
    assert not server.pool.jobs
    found = together(1, lambda rank, exchange: summed(server, exchange))
    assert found == [[3, 3]]


def summed(server, exchange):
    """A job of one worker."""
    alone = JoinRing([Group((0,), 0)], job(0, {0: server}, name="alone"))
    one = alone.join(exchange)
    values = np.array([3, 3], np.int32)
    one.all_reduce(values)
    one.close(well=True)
    return values.tolist()


def test_a_crowd_of_strangers_keeps_nobody_out(server, monkeypatch):
    monkeypatch.setattr(module, "STRANGERS", 3)
    crowd = [connected(server) for _ in range(6)]
    assert [heard(peer)[0] for peer in crowd] == [Kind.CHALLENGE] * 6
    found = together(1, lambda rank, exchange: summed(server, exchange))
    assert found == [[3, 3]]
    for peer in crowd:
        peer.close()


def hello(server, number=0, role="worker", token=TOKEN, **changes):
    one = Registration(server.address, token, "the aggregator")
    terms = msgspec.structs.replace(TERMS, **changes)
    one.send_hello(role, number, f"rank {number}", terms)
    return one.granted()[0]


REFUSED = {
    "token": ({"token": "another"}, "another token"),
    "twice": ({}, "is already connected"),
    "terms": ({"window": 1}, "the same terms"),
    "role": ({"role": "king"}, "expected a worker"),
    "agent": ({"role": "agent"}, "0 agents"),
    "memory": ({"job": "large", "window": 4096, "chunk_bytes": 1 << 20}, None),
}


@pytest.mark.parametrize("what", REFUSED)
def test_whoever_cannot_take_part_hears_why_and_the_job_goes_on(server, what):
    changes, words = REFUSED[what]
    first = hello(server)
    if words is None:
        hello(server, **changes).close()  # as much as there is
    else:
        with pytest.raises(UsageError, match=words):
            hello(server, **changes)
    assert server.pool.jobs["job"].window == 2
    first.close()
    wait_until(lambda: "job" not in server.pool.jobs, SECONDS, "the end of the job")


BROKEN = {
    "beyond the window": [
        frame_of(Kind.CONTRIBUTION, b"0123", position=position) for position in range(3)
    ],
    "a chunk too large": [frame_of(Kind.CONTRIBUTION, bytes(2048))],
    "a sum": [frame_of(Kind.SUM, b"0123")],
    "a second hello": [frame_of(Kind.HELLO, b"{}")],
    "half a number": [frame_of(Kind.CONTRIBUTION, b"012")],
    "somebody else's goodbye": [frame_of(Kind.LOST, b"all is over")],
}


@pytest.mark.parametrize("what", BROKEN)
def test_whoever_breaks_the_protocol_ends_his_own_job_only(server, what):
    terms = {"expected": (2,)}
    bad, good = hello(server, 0, **terms), hello(server, 1, **terms)
    other = hello(server, 0, job="other")
    bad.socket.setblocking(True)
    good.socket.setblocking(True)
    bad.socket.sendall(b"".join(BROKEN[what]))
    kind, words = heard(good.socket)
    assert kind == Kind.LOST
    assert b"rank 0 broke the protocol" in words
    assert list(server.pool.jobs) == ["other"]
    for one in (bad, good, other):
        one.close()


def test_jobs_share_an_aggregator_and_one_may_die(server):
    """Its memory is free again, and no bit of the other changes."""

    over = {pair: threading.Barrier(2) for pair in (0, 1)}

    def work(rank, exchange):
        name, pair = ("dies", "stays")[rank // 2], rank // 2

        def among(words):
            return exchange(words)[2 * pair : 2 * pair + 2]

        one = ring([0, 0], {0: server}, rank % 2, name=name).join(among)
        right = True
        for number in range(20):
            values = values_of(rank % 2, 5000, number)
            if rank == 1 and number == 7:
                one.close(well=False)
                return None
            try:
                one.all_reduce(values)
            except PeerLostError as error:
                one.close(well=False)
                return str(error)
            right = right and (values == total(2, 5000, number)).all()
        over[pair].wait(SECONDS)
        one.close(well=True)
        return right

    found = together(4, work)
    assert "rank 1 died" in found[0]
    assert found[2:] == [True, True]


def test_where_it_cannot_or_may_not_listen_is_said(monkeypatch):
    monkeypatch.delenv(TRUSTED, raising=False)
    with pytest.raises(UsageError, match=TRUSTED):
        check_may_be_read("10.0.0.1", {})
    check_may_be_read("10.0.0.1", {TRUSTED: "1"})
    with pytest.raises(UsageError, match="secret token"):
        AggregatorServer(HOST, 0, token="")
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port}"):
            AggregatorServer(HOST, port, token=TOKEN)
    with pytest.raises(UsageError, match="cannot listen"):
        AggregatorServer(HOST, 1 << 20, token=TOKEN)


def test_who_answers_with_something_else_is_no_aggregator():
    with socket.create_server((HOST, 0)) as listener:
        one = Registration(listener.getsockname(), TOKEN, "the aggregator")
        peer, _ = listener.accept()
        peer.sendall(b"220 mail.example.org ESMTP ready\r\n")
        with pytest.raises(UsageError, match="is an aggregator"):
            one.send_hello("worker", 0, "rank 0", TERMS)
        peer.close()


def test_who_has_no_token_cannot_feign_an_aggregator():
    """It learns nothing from the hello that proves it to be one."""
    with socket.create_server((HOST, 0)) as listener:
        one = Registration(listener.getsockname(), TOKEN, "the aggregator", "a nonce")
        one.send_hello("worker", 0, "rank 0", TERMS)
        peer, _ = listener.accept()
        answer = b'{"window":2,"chunk_bytes":1024,"proof":"0123456789abcdef"}'
        peer.sendall(frame_of(Kind.GRANTED, answer))
        with pytest.raises(UsageError, match="has not shown"):
            one.granted()
        peer.close()
