"""Every survivor learns which rank died: the hub alone, and real processes without any
launcher that would end them."""

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.runtimes.real.job_store import JobStore
from paceline.runtimes.real.peer_monitor import (
    LINE_BYTES,
    FailureNotice,
    PeerMonitor,
    end_after_grace,
)
from paceline.runtimes.real.runtime import RealRuntime
from paceline.timeouts import timeouts
from tests.support import forked
from tests.support.hanging import SECONDS
from tests.support.processes import DictStore, all_processes, wait_until

SCRIPT = Path(__file__).parent / "scripts" / "dies.py"


@pytest.fixture
def ranks():
    """Three ranks in one process that know each other, and the queue of what each was told:
    text of a death, or the number and text of a training that broke."""
    store, told = DictStore(), queue.Queue()
    job_store = JobStore(store, 3)
    members = [
        PeerMonitor(
            rank,
            3,
            job_store,
            lambda text, rank=rank: told.put((rank, text)),
            lambda *news, rank=rank: told.put((rank, news)),
        )
        for rank in range(3)
    ]
    wait_until(lambda: len(members[0].hub.present) == 3, SECONDS, "all ranks")
    yield members, told, store
    for member in reversed(members):
        member.close()
    job_store.close()


def hear(told, count):
    return dict(told.get(timeout=SECONDS) for _ in range(count))


def connection(store):
    address = JobStore(store, 3).address("paceline/liveness")
    connection = socket.create_connection((address.host, address.port), SECONDS)
    return connection, address.token


def die(member):
    """As a process that is gone, which hears nothing."""
    member._over = True
    member._socket.shutdown(socket.SHUT_RDWR)


def test_a_lost_connection_is_told_to_everybody(ranks):
    members, told, _ = ranks
    die(members[1])
    heard = hear(told, 2)
    assert set(heard) == {0, 2}
    assert all(f"process {os.getpid()}) died" in text for text in heard.values())
    assert all(text.startswith("rank 1 ") for text in heard.values())


def test_a_fault_is_told_in_its_own_words(ranks):
    members, told, _ = ranks
    members[2].close("failed with ValueError: boom")
    assert hear(told, 2) == dict.fromkeys((0, 1), "rank 2 failed with ValueError: boom")


def test_a_goodbye_is_no_alarm_and_hides_no_later_death(ranks):
    members, told, _ = ranks
    members[1].close()
    die(members[2])
    heard = hear(told, 1)
    assert heard[0].startswith("rank 2 ")
    assert told.empty()


def test_a_training_that_broke_is_told_and_its_rank_goes_on(ranks):
    members, told, _ = ranks
    members[1].report_training_failure(4, "broke off: boom")
    assert hear(told, 2) == dict.fromkeys((0, 2), (4, "rank 1 broke off: boom"))
    die(members[1])
    heard = hear(told, 2)
    assert set(heard) == {0, 2}
    assert all(text.startswith("rank 1 (host") for text in heard.values())


def test_the_end_of_rank_0_is_no_alarm(ranks):
    members, told, _ = ranks
    members[0].close()
    for member in members[1:]:
        member._thread.join(SECONDS)
        assert not member._thread.is_alive()
    assert told.empty()


@pytest.mark.parametrize(
    "words",
    [
        b"\x80\x04\x95 not a line of ours\n",
        b'{"token": "wrong", "rank": 1, "host": "here", "process": 1}\n',
        b'{"token": "TOKEN", "rank": 77, "host": "here", "process": 1}\n',
        b"x" * (LINE_BYTES + 1),
        b'{"x":' + b"[" * 3000 + b"\n",
        b'{"rank": 1, "fault": "lies"}\n',
    ],
)
def test_strangers_are_shown_out_and_nobody_is_alarmed(ranks, words):
    members, told, store = ranks
    stranger, token = connection(store)
    stranger.sendall(words.replace(b"TOKEN", token.encode()))
    stranger.settimeout(SECONDS)
    assert stranger.recv(1) == b""  # closed by the hub
    stranger.close()
    members[1]._send(FailureNotice(rank=1, fault="is the first to be heard"))
    expected = "rank 1 is the first to be heard"
    assert hear(told, 2) == dict.fromkeys((0, 2), expected)


@pytest.mark.slow
def test_a_crowd_of_strangers_is_bounded(ranks):
    _, _, store = ranks
    crowd = [connection(store)[0] for _ in range(40)]
    first = crowd[0]
    first.settimeout(SECONDS)
    assert first.recv(1) == b""  # the oldest makes room
    for stranger in crowd:
        stranger.close()


def ends_of(case):
    """What became of three ranks that nobody watches over."""
    ranks = forked.together(3, [SCRIPT, case])
    try:
        return [rank.done() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize(
    ("case", "dead", "words"),
    [
        ("kill 0 training", 0, "rank 0 died"),
        ("kill 2 training", 2, "rank 2 (host"),
        ("kill 1 barrier", 1, "rank 1 (host"),
        ("raise 1 barrier", 1, "rank 1 failed with ValueError: boom"),
    ],
)
def test_survivors_of_real_processes_know_who(case, dead, words):
    for rank, end in enumerate(ends_of(case)):
        if rank == dead:
            expected = -signal.SIGKILL if case.startswith("kill") else 1
            assert end.returncode == expected
        else:
            assert end.returncode == 1
            assert words in end.stderr


SAVES = SCRIPT.with_name("saves_when_lost.py")


@pytest.fixture
def saving(tmp_path, monkeypatch):
    """Starts ranks of `SAVES` in an empty folder, with that many seconds of grace."""
    started = []

    def start(ranks, case, grace):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PACELINE_EXIT_GRACE_SECONDS", grace)
        started.extend(forked.together(ranks, [SAVES, case]))
        return started

    yield start
    for rank in started:
        rank.kill()


@pytest.mark.slow
def test_a_survivor_that_catches_the_error_writes_its_whole_checkpoint(
    saving, tmp_path
):
    ranks = saving(3, "save", "120")
    assert ranks[2].done().returncode == -signal.SIGKILL
    survivor = ranks[0].done()
    assert survivor.returncode == 0, survivor.stderr
    assert "rank 2 (host" in survivor.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["emergency.pt"]


@pytest.mark.slow
def test_who_hangs_in_a_collective_ends_promptly_and_others_when_their_grace_is_over(
    saving, monkeypatch
):
    monkeypatch.setenv("PACELINE_TIMEOUTS", "collective_grace=0.5")
    ranks = saving(3, "hang", "6")
    for rank in (0, 1):
        assert ranks[1].poll() is None, "it was to end after rank 0"
        end = ranks[rank].done()
        assert end.returncode == 1
        assert "rank 2 (host" in end.stderr


def test_a_survivor_ends_though_nobody_reads_its_errors(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    said, ends = threading.Event(), []
    with open(writer, "w") as unread, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", unread)
        patch.setattr(os, "_exit", ends.append)
        end_after_grace(0, "rank 1 died", said, lambda: True, 0.0)
        with contextlib.suppress(OSError):
            unread.close()
    assert ends == [1]
    assert said.is_set()


def test_a_grace_that_is_no_time_is_refused(saving):
    end = saving(1, "save", "soon")[0].done()
    assert end.returncode == 1
    assert "PACELINE_EXIT_GRACE_SECONDS" in end.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dead", "words"), [(0, "rank 0 died"), (1, "rank 1 (host")], ids=["0", "1"]
)
def test_a_forked_helper_keeps_no_dead_rank_alive(dead, words):
    """Nor the server process of rank 0, which ends with it."""
    ranks = forked.together(2, [SCRIPT, f"kill {dead} training backup"])
    try:
        ends = [rank.done() for rank in ranks]
        for rank in ranks:  # its helper alone is left
            wait_until(lambda p=rank.pid: len(group_of(p)) == 1, SECONDS, "the ends")
    finally:
        for rank in ranks:
            rank.kill()
    assert ends[dead].returncode == -signal.SIGKILL
    assert ends[1 - dead].returncode == 1
    assert words in ends[1 - dead].stderr


def group_of(leader):
    """The live processes of its process group."""
    found = []
    for process in all_processes():
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            if int(stat[2]) == leader and stat[0] not in "ZX":
                found.append(process)
    return found


def test_a_rank_that_ends_long_before_the_others_alarms_nobody():
    ends = ends_of("early 1 training")
    assert [end.returncode for end in ends] == [0, 0, 0], ends
    assert not any("paceline:" in end.stderr for end in ends)


class Leaving(RealRuntime):
    """A worker at its good end, while another thread decides whether a lost peer makes it a bad one: that
    thread never finishes."""

    def __init__(self):
        self._failure_judged = threading.Event()
        self._exit_grace = 0.01


def test_a_good_end_does_not_wait_for_ever_for_a_decision_that_never_comes(monkeypatch):
    monkeypatch.setattr(timeouts, "collective_grace", 0.01)
    closed = queue.Queue()
    liveness = SimpleNamespace(close=closed.put)
    threading.Thread(
        target=Leaving()._part_from_others, args=(liveness, None), daemon=True
    ).start()
    assert closed.get(timeout=SECONDS) is None
