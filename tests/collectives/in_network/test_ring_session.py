"""Rings of racks over real sockets: any layout, lossy ways, and what can go wrong at the start
and in mid-run."""

import contextlib
import socket
import threading

import numpy as np
import pytest

from paceline.collectives.in_network.packets import blank
from paceline.collectives.in_network.ring_session import RingEnd
from paceline.collectives.in_network.topology import one_switch, ring_of_racks
from paceline.errors import PeerLostError, UsageError
from tests.collectives.in_network.test_server import TOKEN, lossy, running, together
from tests.support.hanging import SECONDS
from tests.support.processes import wait_until


class Exchanges:
    """Every thread's words for every other's."""

    def __init__(self, size):
        self.said, self.barrier = [b""] * size, threading.Barrier(size)

    def of(self, rank):
        def exchange(words):
            self.said[rank] = words
            self.barrier.wait(SECONDS)
            said = list(self.said)
            self.barrier.wait(SECONDS)
            return said

        return exchange


@contextlib.contextmanager
def aggregators(racks, **options):
    with contextlib.ExitStack() as stack:
        yield {
            rack: stack.enter_context(running(**options)) for rack in sorted(set(racks))
        }


def addresses(running_ones):
    return {rack: ("127.0.0.1", one.port) for rack, one in running_ones.items()}


def in_a_ring(ring, where, work, job="a ring", **options):
    """*work* of every rank with its end; what they gave."""
    size = sum(len(group.ranks) for group in ring)
    exchanges = Exchanges(size)
    own = {"token": TOKEN, "job": job} | options

    def one(rank):
        chance = lossy(rank, 0.01) if options.get("lossy") else None
        end = RingEnd(ring, rank, where, exchanges.of(rank), **own | {"lossy": chance})
        try:
            return work(rank, end)
        finally:
            end.serve_while(lambda: exchanges.barrier.wait(SECONDS))
            end.close()

    return together(size, one)


@pytest.mark.parametrize("faulty", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("racks", "aggregating"),
    [([0, 0, 0], {0}), ([0, 0, 1, 1], {0, 1}), ([0, 0, 1, 1], {1}), ([0, 1, 1], {1})],
)
def test_sums_are_exact(racks, aggregating, faulty):
    random = np.random.default_rng(0)
    made = [
        random.integers(-(2**31), 2**31, (len(racks), size)).astype(np.int32)
        for size in (30_011, 1, 4000)
    ]
    totals = [values.sum(axis=0, dtype=np.int64).astype(np.int32) for values in made]
    with aggregators(aggregating) as there:

        def work(rank, end):
            for values in made:
                end.sum_integers(values[rank])

        ring = ring_of_racks(racks, aggregating)
        in_a_ring(ring, addresses(there), work, lossy=faulty, slots=32)
    for values, total in zip(made, totals, strict=True):
        assert (values == total).all()


def errors_of(kind, where, **options):
    """What two ranks are told that want to sum at one switch, and may not."""
    exchanges, errors = Exchanges(2), []

    def one(rank):
        own = {"token": TOKEN, "job": "refused"} | options
        try:
            RingEnd(one_switch(2, 0), rank, where, exchanges.of(rank), **own)
        except kind as error:
            errors.append(str(error))

    together(2, one)
    assert len(errors) == 2
    return errors


def test_what_is_refused_is_refused_on_all_ranks():
    with aggregators([0]) as there:
        where = addresses(there)
        for options, said in (
            ({"token": "another"}, "another token"),
            ({"mtu": 90}, "MTU 90: expected"),
            ({"mtu": 9000}, "start it with a larger --mtu"),
        ):
            for error in errors_of(UsageError, where, **options):
                assert said in error
    for error in errors_of(PeerLostError, where):
        assert "cannot be reached" in error


def test_an_aggregator_that_dies_is_a_loss_and_values_are_as_they_were():
    racks = [0, 0, 1, 1]
    began, died = threading.Barrier(4), threading.Event()
    values = [np.full(200_000, rank, np.int32) for rank in range(4)]

    def told():
        if died.is_set():
            raise PeerLostError("told by others")

    with aggregators({1}) as there, contextlib.ExitStack() as first:
        there[0] = first.enter_context(running())

        def work(rank, end):
            end.sum_integers(np.ones(10, np.int32))
            began.wait(SECONDS)
            end.watch = told if racks[rank] else None
            if rank == 0:
                first.close()
                died.set()
            with pytest.raises(PeerLostError):
                end.sum_integers(values[rank])

        in_a_ring(ring_of_racks(racks, {0, 1}), addresses(there), work)
    for rank in range(4):
        assert (values[rank] == rank).all()


def test_what_strangers_send_to_workers_changes_nothing():
    ring, racks = ring_of_racks([0, 0, 1], {0}), [0, 0, 1]
    values = [np.full(50_000, 1 + rank, np.int32) for rank in range(len(racks))]
    targets, over = [], threading.Event()

    def bother():
        random = np.random.default_rng(0)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            while not over.is_set():
                for target in list(targets):
                    packets = blank(1, 358)
                    header = packets["header"]
                    header["kind"], header["flags"] = random.integers(0, 9), 1
                    header["job"], header["slot"] = random.integers(0, 2**32), 3
                    whole = packets.tobytes()
                    for data in (whole, whole[:50], random.bytes(1472), b""):
                        with contextlib.suppress(OSError):
                            stranger.sendto(data, target)

    def work(rank, end):
        targets.append(end._inbox._udp.getsockname())
        targets.append(end._end._udp.getsockname())
        for _ in range(3):
            mine = values[rank].copy()
            end.sum_integers(mine)
            assert (mine == 6).all()

    attacker = threading.Thread(target=bother)
    attacker.start()
    try:
        with aggregators([0]) as there:
            in_a_ring(ring, addresses(there), work)
    finally:
        over.set()
        attacker.join()


def test_a_job_that_finds_no_slot_free_is_refused_on_all_ranks():
    with aggregators([0], slots=4) as there:
        where = addresses(there)

        def hold(rank, end):
            end.serve_while(lambda: tried.wait(SECONDS))

        tried = threading.Event()
        holding = threading.Thread(
            target=in_a_ring, args=(one_switch(2, 0), where, hold), kwargs={"slots": 4}
        )
        holding.start()
        try:
            wait_until(lambda: not there[0].jobs.free_slots, SECONDS, "the first job")
            for error in errors_of(UsageError, where):
                assert "start the aggregator with more --slots" in error
        finally:
            tried.set()
            holding.join(SECONDS)
