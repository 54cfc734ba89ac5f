"""Sums by aggregators are exact, and nobody waits for ever: any layout, little memory, full ways, and
whoever dies whenever."""

import random
import socket
import threading

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives.in_network import session, stages, wire
from paceline.collectives.in_network.aggregator import ChunkPool, Job
from paceline.collectives.in_network.joining import JoinTree
from paceline.errors import PeerLostError, UsageError
from paceline.timeouts import timeouts
from tests.collectives.in_network.sums import (
    HOST,
    TOKEN,
    aggregators,
    check_sums,
    job,
    layouts,
    ring,
    together,
    tree,
    trees,
    values_of,
)
from tests.support.hanging import SECONDS
from tests.support.processes import wait_until
from tests.support.profiles import examples

WAYS = {"ring": ring, "tree": tree}
MOMENT = 1.0
"""Seconds in which a small sum over loopback is there, or never."""
TWO_RACKS = [0, 0, 1, 1]


@pytest.fixture
def narrow(monkeypatch):
    """Ways that hold a few kB: so whoever sends waits for whoever reads."""
    begin = wire.Connection.__init__

    def narrowed(connection, peer):
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 10)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
        begin(connection, peer)

    monkeypatch.setattr(wire.Connection, "__init__", narrowed)


@pytest.mark.parametrize("ways", WAYS)
@settings(max_examples=examples(12))
@given(
    layout=layouts(),
    sizes=st.lists(st.sampled_from([1, 2, 1000, 4097, 50_000]), min_size=1, max_size=4),
)
def test_sums_of_any_layout_are_exact(ways, layout, sizes):
    racks, aggregating = layout
    check_sums(WAYS[ways], racks, sizes, aggregating=aggregating)


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.usefixtures("narrow")
@settings(max_examples=examples(5))
@given(layout=layouts(), memory=st.integers(2 << 10, 40 << 10))
def test_little_memory_and_full_ways_stop_nobody(ways, layout, memory):
    """A pool of one chunk, or a few; a chunk is larger than what a connection holds."""
    racks, aggregating = layout
    check_sums(
        WAYS[ways], racks, [30_000, 1, 9000], memory=memory, aggregating=aggregating
    )


def test_workers_in_a_thousand_places_of_a_window(monkeypatch):
    """Far more chunks than a window has, and a window of one."""
    monkeypatch.setattr(session, "WINDOW", 1)
    check_sums(ring, TWO_RACKS, [400_000])


@settings(max_examples=examples(8))
@given(ways=trees(), memory=st.integers(2 << 10, 80 << 10))
def test_servers_anywhere_form_exact_sums(ways, memory):
    """Beside workers or on hosts of their own, behind switches of which some merge."""
    if not ways.aggregating_racks and ways.servers[0].rank is not None:
        return  # the plain ring's
    with aggregators(range(len(ways.servers))) as own:

        def tree_of(racks, servers, rank):
            there = ServerPlaces(own) if ways.servers[0].rank is None else None
            return JoinTree(ways, there, job(rank, servers))

        check_sums(
            tree_of,
            ways.racks,
            [20_000, 3],
            memory=memory,
            aggregating=ways.aggregating,
        )


class ServerPlaces:
    """Dedicated servers, which are there already."""

    def __init__(self, servers):
        self.addresses = [server.address for server in servers.values()]

    def open(self, token):
        return self.addresses


# ---- the laws catch what they are there for ----


def backwards(count, chunks, behind):
    """The order of stages turned around: a ring waits in a circle."""
    return in_order(count, chunks, behind)[::-1]


def doubled(self, source, position, members, values, *more):
    """A contribution that is added twice."""
    sends = contribute(self, source, position, members, values, *more)
    chunk = self._open.get(position)
    if chunk is not None and chunk.values is not None:
        chunk.values += 1
    return sends


def summed(self, source, position, members, values, mode, kind):
    """Contributions to a maximum that are added up."""
    return contribute(self, source, position, members, values, mode)


def forgetful(self, size):
    """Memory for best effort that is never free, and of which nobody is told."""
    self.held += size
    return True


contribute, in_order = Job.contribute, stages._in_order
MUTANTS = {
    "a ring in a circle": ("ring", stages, "_in_order", backwards),
    "added twice": ("ring", Job, "contribute", doubled),
    "maxima that are sums": ("ring", Job, "contribute", summed),
    "memory that is lost": ("tree", Job, "_take", forgetful),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(mutant, monkeypatch):
    ways, place, name, broken = MUTANTS[mutant]
    monkeypatch.setattr(place, name, broken)
    monkeypatch.setattr(timeouts, "aggregator_probe", MOMENT)
    with pytest.raises((AssertionError, UsageError)):
        check_sums(WAYS[ways], TWO_RACKS, [30_000], seconds=MOMENT, memory=40 << 10)


# ---- somebody dies ----


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("victim", ["worker", "aggregator"])
def test_who_dies_at_any_moment_is_known_to_all_at_once(ways, victim, seed):
    """All others raise; none has a sum that is wrong."""
    choose = random.Random(f"{ways} {victim} {seed}")
    after = choose.randrange(1, 40)
    dies = choose.randrange(4)
    finished = [0] * 4
    met = threading.Barrier(4)

    def work(rank, exchange):
        one = WAYS[ways](TWO_RACKS, servers, rank).join(exchange)
        try:
            for number in range(10_000):
                if number == after and rank == dies:
                    if victim == "worker":
                        raise PeerLostError("this one dies")
                    servers[dies % 2]._stopped = True
                    wake(servers[dies % 2])
                values = values_of(rank, 3000, number)
                one.all_reduce(values)
                finished[rank] = number
        finally:
            one.close(well=False)
            met.wait(10)

    with aggregators([0, 1]) as servers:
        found = together(4, work)
        assert all(isinstance(error, PeerLostError) for error in found), found
        assert max(finished) - min(finished) <= 1
        if victim == "worker":
            for server in servers.values():
                wait_until(lambda it=server: not it.pool.jobs, SECONDS, "their end")


def wake(server):
    """Whoever connects wakes it, and it sees that it is to end."""
    socket.create_connection(server.address).close()


def test_a_worker_that_goes_while_nobody_sums_is_missed():
    def work(rank, exchange):
        one = ring(TWO_RACKS, servers, rank).join(exchange)
        reading, writing = socket.socketpair()
        try:
            if rank == 3:
                one.close(well=False)
                return None
            with pytest.raises(PeerLostError) as error:
                one.idle(60, reading.fileno())
            one.close(well=False)
            return str(error.value)
        finally:
            reading.close()
            writing.close()

    with aggregators([0, 1]) as servers:
        found = together(4, work)
    assert all(found[rank] for rank in range(3)), found
    assert all("rank 3 died" in found[rank] for rank in (2,)), found


# ---- what cannot work is an error on all ranks, at the start ----


@pytest.mark.parametrize("ways", WAYS)
def test_another_token_is_refused_on_all_ranks(ways):
    def work(rank, exchange):
        token = "another token" if rank == 1 else TOKEN
        WAYS[ways](TWO_RACKS, servers, rank, token=token).join(exchange)

    with aggregators([0, 1]) as servers:
        found = together(4, work)
        assert all(isinstance(error, UsageError) for error in found), found
        assert all("another token" in str(error) for error in found)


@pytest.mark.parametrize("ways", WAYS)
def test_an_aggregator_that_is_not_there_is_an_error_on_all_ranks(ways):
    with aggregators([0, 1]) as servers:
        pass  # their ports are free again

    def work(rank, exchange):
        WAYS[ways](TWO_RACKS, servers, rank).join(exchange)

    found = together(4, work)
    assert all(isinstance(error, PeerLostError) for error in found), found
    assert all("cannot be reached" in str(error) for error in found)


def test_no_memory_at_all_is_an_error_on_all_ranks():
    with aggregators([0, 1], memory=1000) as servers:
        found = together(
            4, lambda rank, exchange: ring(TWO_RACKS, servers, rank).join(exchange)
        )
    assert all("--memory" in str(error) for error in found), found


def test_strangers_stop_no_ring():
    """A worker alone listens: who connects and has no proof is turned away."""
    listens = []

    def work(rank, exchange):
        def spying(words):
            said = exchange(words)
            if rank == 0 and b'"listens"' in said[2] and not listens:
                card = msgspec.json.decode(said[2])
                if card["listens"][1]:
                    stranger = socket.create_connection((HOST, card["listens"][1]))
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    listens.append(stranger)
            return said

        one = ring([0, 0, 1], servers, rank).join(spying)
        values = values_of(rank, 100)
        one.all_reduce(values)
        exchange(b"")
        one.close(well=True)
        return values.tobytes()

    with aggregators([0]) as servers:
        found = together(3, work)
    assert listens
    assert len(set(found)) == 1, found
    listens[0].close()


def test_pools_are_shared_by_jobs_of_other_names():
    """Two jobs at one aggregator; the end of one is nothing to the other."""
    pool = ChunkPool(1 << 20)
    terms = wire.Terms(job="one", expected=(2,), window=2, chunk_bytes=1024)
    one = pool.job_for(terms)
    other = pool.job_for(msgspec.structs.replace(terms, job="other"))
    assert pool.free == (1 << 20) - 2 * one.held
    pool.end(one)
    pool.end(one)
    assert pool.free == (1 << 20) - other.held
    assert list(pool.jobs) == ["other"]
