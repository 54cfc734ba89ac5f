"""Connections whose end says that a process is gone: what feigns no end, and hides none."""

import contextlib
import errno
import os
import select
import socket
import struct
from pathlib import Path

import pytest
import zmq

from paceline.errors import UsageError
from paceline.runtimes.real.job_store import JobStore
from paceline.runtimes.real.peer_monitor import PeerMonitor
from paceline.transport import liveness
from tests.support.server_jobs import Adder, connect, running

VARIABLE = liveness.UNREACHABLE_VARIABLE


class DictStore(dict):
    """What torch's store is to liveness."""

    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key):
        return self[key]


@pytest.fixture
def job():
    """Two ranks, and a server with one worker: all ends of their watched connections, what
    the hub has beside them, and the worker's connection for messages."""
    store = DictStore()
    job_store = JobStore(store, 2)
    ranks = [PeerMonitor(rank, 2, job_store, lambda _: None) for rank in range(2)]
    hub = ranks[0].hub
    with contextlib.ExitStack() as stack:
        stack.callback(job_store.close)
        for rank in reversed(ranks):
            stack.callback(rank.close)
        host = stack.enter_context(running(Adder(1), workers=1))
        server = stack.enter_context(contextlib.closing(connect(host)))
        while len(list(hub._idle_connections)) < 2:
            hub._thread.join(0.01)
        watched = [rank._socket for rank in ranks] + list(hub._idle_connections)
        watched += [server._liveness, *host.listener._sessions._owners]
        alone = [hub._listener, hub._wake, hub._waker]
        yield watched, alone, server._channels[""].socket


def settings(connection):
    options = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
    return [connection.getsockopt(socket.IPPROTO_TCP, option) for option in options]


@pytest.mark.parametrize("allowed", [None, "4", "0.5", "3600"])
def test_a_shorter_cut_ends_no_connection(job, allowed, monkeypatch):
    """The last probe before a connection is given up leaves later than any cut that is
    allowed has lasted, also where the first has left just after the cut."""
    if allowed is not None:
        monkeypatch.setenv(VARIABLE, allowed)
    with socket.socket() as plain:
        liveness.watch(plain)
        idle, interval, probes = settings(plain)
    seconds = float(allowed or 300)
    assert interval * (probes - 1) >= seconds
    assert idle + interval * probes <= max(1.3 * seconds, seconds + 3)


def test_all_ends_of_all_connections_are_equally_patient(job):
    watched, _, messenger = job
    assert len(watched) == 6
    interval, probes = liveness.keep_alive()
    for connection in watched:
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert settings(connection) == [interval, interval, probes]
        timeout = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert timeout == 0  # would overrule the number of probes
    # It speaks later: the liveness connection has the words.
    assert messenger.getsockopt(zmq.TCP_KEEPALIVE_IDLE) == interval
    assert messenger.getsockopt(zmq.TCP_KEEPALIVE_INTVL) == interval
    assert messenger.getsockopt(zmq.TCP_KEEPALIVE_CNT) > probes


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_time_that_makes_no_sense_is_refused(text, monkeypatch):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(UsageError, match=f"{VARIABLE}: expected seconds above 0"):
        liveness.keep_alive()


def test_a_silent_network_is_no_death(monkeypatch):
    monkeypatch.setenv(VARIABLE, "7")
    for number in (errno.ETIMEDOUT, errno.EHOSTUNREACH):
        words = liveness.how_it_ended(OSError(number, "..."))
        assert words.startswith("was unreachable for 7 s")
        assert "died" not in words
    for error in (None, OSError(errno.ECONNRESET, "...")):
        assert liveness.how_it_ended(error).startswith("died")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_forked_child_keeps_nothing_alive(job):
    watched, alone, _ = job
    reading, writing = os.pipe()
    with open(reading, "rb"), open(writing, "wb") as pipe:
        liveness.close_in_children(pipe)
        ours = {os.fstat(end.fileno()).st_ino for end in (*watched, *alone)}
        assert len(ours) == len(watched) + len(alone)
        child = os.fork()
        if child == 0:
            # A pipe's ends have one inode: here only the reading one may be left.
            found = [os.fstat(int(fd)).st_ino for fd in open_descriptors()]
            mine = os.fstat(reading).st_ino
            clean = not ours & set(found) and found.count(mine) == 1
            os._exit(0 if clean else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        pipe.write(b"still open here\n")
    assert all(end.fileno() >= 0 for end in (*watched, *alone))


def open_descriptors():
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.fstat(int(name))
            found.append(name)
    return found


@pytest.fixture
def door():
    """A listener, and a function that connects to it."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        place = listener.getsockname()

        def knock():
            return stack.enter_context(socket.create_connection(place))

        yield listener, knock


def heard(callers, peer):
    """What *peer* has said, once something is there."""
    select.select([peer], [], [])
    return callers.read(peer)


def test_a_crowd_of_strangers_loses_its_oldest_and_nobody_who_is_known(door):
    listener, knock = door
    callers = liveness.IdleConnections(strangers=2, line_bytes=64)
    ends = [knock() for _ in range(4)]
    first, second, third = (callers.accept(listener, callers.close) for _ in range(3))
    assert list(callers) == [second, third]
    assert ends[0].recv(1) == b""
    callers.know(second)
    fourth = callers.accept(listener, callers.close)
    assert first not in callers
    assert list(callers) == [second, third, fourth]
    callers.close_all()
    assert list(callers) == []
    assert all(end.recv(1) == b"" for end in ends)


def test_lines_are_given_whole_however_they_come(door):
    listener, knock = door
    callers = liveness.IdleConnections(strangers=2, line_bytes=64)
    end = knock()
    peer = callers.accept(listener, callers.close)
    assert callers.read(peer) == ((), False, None)
    end.sendall(b"one\ntw")
    assert heard(callers, peer) == ([b"one"], False, None)
    end.sendall(b"o\nthree\n")
    assert heard(callers, peer) == ([b"two", b"three"], False, None)
    end.close()
    assert heard(callers, peer) == ([], True, None)
    callers.close_all()


def test_a_line_without_an_end_is_the_end(door):
    listener, knock = door
    callers = liveness.IdleConnections(strangers=2, line_bytes=64)
    end = knock()
    peer = callers.accept(listener, callers.close)
    end.sendall(b"x" * 65)
    said = heard(callers, peer)
    while not said.over:
        said = heard(callers, peer)
    assert said == ([], True, None)
    callers.close_all()


def test_a_connection_that_breaks_says_how(door):
    listener, knock = door
    callers = liveness.IdleConnections(strangers=2, line_bytes=64)
    end = knock()
    peer = callers.accept(listener, callers.close)
    # Closed with something unread or in haste, it is reset.
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()
    said = heard(callers, peer)
    assert said.over
    assert said.error.errno == errno.ECONNRESET
    callers.close_all()
