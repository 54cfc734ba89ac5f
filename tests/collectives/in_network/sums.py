"""Sums of several ranks, each a thread, over loopback: aggregators, and how ranks find each other."""

import contextlib
import threading

import numpy as np
from hypothesis import strategies as st

from paceline.collectives.in_network.joining import JobConfig, JoinRing, JoinTree
from paceline.collectives.in_network.server import AggregatorServer, ServerThread
from paceline.collectives.in_network.topology import (
    AtpTree,
    ServerPlace,
    beside_workers,
    ring_of_racks,
)
from tests.support.hanging import SECONDS
from tests.support.processes import wait_until

HOST, TOKEN = "127.0.0.1", "a token of tests"
MEMORY = 16 << 20


@contextlib.contextmanager
def aggregators(racks, memory=MEMORY):
    """One for each of *racks*: by rack."""
    threads = {
        rack: ServerThread(AggregatorServer(HOST, 0, token=TOKEN, memory=memory))
        for rack in racks
    }
    try:
        yield {rack: thread.server for rack, thread in threads.items()}
    finally:
        for thread in threads.values():
            thread.close()


def together(ranks, work):
    """What *work* of each rank returns, or raises; it is given an exchange among all."""
    box, found = [b""] * ranks, [None] * ranks
    everybody = threading.Barrier(ranks)

    def exchange_of(rank):
        def exchange(words):
            box[rank] = words
            everybody.wait(SECONDS)
            said = list(box)
            everybody.wait(SECONDS)
            return said

        return exchange

    def run(rank):
        try:
            found[rank] = work(rank, exchange_of(rank))
        except Exception as error:
            found[rank] = error

    threads = [
        threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads), "somebody hangs"
    return found


def job(rank, servers, name="job", token=TOKEN):
    where = {rack: server.address for rack, server in servers.items()}
    return JobConfig(rank, where, name, token)


def ring(racks, servers, rank, **more):
    """*rank*'s way into a ring of *racks*."""
    return JoinRing(ring_of_racks(racks, servers), job(rank, servers, **more))


def tree(racks, servers, rank, **more):
    """*rank*'s way to ATP's servers, one beside each worker."""
    ways = AtpTree(tuple(racks), tuple(servers), beside_workers(racks))
    return JoinTree(ways, None, job(rank, servers, **more))


def values_of(rank, size, seed=0):
    random = np.random.default_rng([seed, size, rank])
    return random.integers(-(2**31), 2**31, size).astype(np.int32)


def total(ranks, size, seed=0):
    sums = np.zeros(size, np.int32)
    for rank in range(ranks):
        sums += values_of(rank, size, seed)
    return sums


def largest_of(ranks, size, seed=0):
    return np.max([values_of(rank, size, seed) for rank in range(ranks)], axis=0)


def check_sums(ways, racks, sizes, *, memory=MEMORY, aggregating=None, seconds=SECONDS):
    """All sums and maxima of a job are exact, on all ranks; nothing is left of it at its aggregators."""
    ranks = len(racks)
    aggregating = sorted(set(racks)) if aggregating is None else aggregating

    def work(rank, exchange):
        session = ways(racks, servers, rank).join(exchange)
        found = []
        for number, size in enumerate(sizes):
            sums, largest = values_of(rank, size, number), values_of(rank, size, number)
            session.all_reduce(largest, "max", seconds)
            session.all_reduce(sums, "sum", seconds)
            found.append((sums, largest))
        exchange(b"")
        session.close(well=True)
        return found

    with aggregators(aggregating, memory) as servers:
        for found in together(ranks, work):
            if isinstance(found, Exception):
                raise found
            for number, (size, two) in enumerate(zip(sizes, found, strict=True)):
                assert (two[0] == total(ranks, size, number)).all()
                assert (two[1] == largest_of(ranks, size, number)).all()
        for server in servers.values():
            eventually_empty(server)


def eventually_empty(server):
    wait_until(lambda: not server.pool.jobs, SECONDS, "the end of all jobs")
    assert server.pool.free == server.pool.memory
    assert server.counts["jobs lost"] == 0


@st.composite
def layouts(draw, most=6):
    """The racks of some workers, and which of these racks aggregate: one that has two workers at
    least."""
    racks = draw(st.lists(st.integers(0, 2), min_size=2, max_size=most))
    racks = sorted(racks)
    useful = [rack for rack in set(racks) if racks.count(rack) > 1]
    if not useful:
        racks[1] = racks[0]
        useful = [racks[0]]
    first = draw(st.sampled_from(useful))
    others = draw(st.sets(st.sampled_from(sorted(set(racks)))))
    return racks, sorted({first, *others})


@st.composite
def trees(draw, racks=3, workers=6):
    """Random `AtpTree`: none, some or all racks aggregate; dedicated servers, or one beside each
    worker."""
    count = draw(st.integers(1, racks))
    places = st.lists(st.integers(0, count - 1), min_size=1, max_size=workers)
    of = tuple(draw(places))
    aggregating = tuple(draw(st.sets(st.integers(0, count - 1))))
    servers = beside_workers(of)
    if draw(st.booleans()):
        homes = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=2))
        servers = tuple(ServerPlace(home, None, k) for k, home in enumerate(homes))
    return AtpTree(of, aggregating, servers)
