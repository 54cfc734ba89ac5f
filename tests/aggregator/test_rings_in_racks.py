"""Rings of racks, each rank and each aggregator on a host of its own, at switches that lose: the
aggregators of user space, those in the kernel, and one of each in one ring."""

import contextlib
import threading

import numpy as np
import pytest

from paceline.aggregator import ends, udp
from paceline.aggregator.ring import ring_of_racks
from paceline.aggregator.ring_end import RingEnd
from tests.aggregator.places import TOKEN, InARack, together
from tests.aggregator.test_udp import one_by_one
from tests.hanging import SECONDS

RANKS = 4


class Exchange:
    """Every thread's words for every other's."""

    def __init__(self):
        self.said, self.barrier = [b""] * RANKS, threading.Barrier(RANKS)

    def of(self, rank):
        def exchange(words):
            self.said[rank] = words
            self.barrier.wait(SECONDS)
            said = list(self.said)
            self.barrier.wait(SECONDS)
            return said

        return exchange


@pytest.mark.parametrize(
    ("racks", "paths"),
    [
        pytest.param([0, 0, 1, 1], {0: "sockets", 1: "xdp"}, marks=pytest.mark.slow),
        ([0, 1, 1, 2], {1: "xdp"}),
        pytest.param([0, 0, 1, 1], {0: "xdp", 1: "xdp"}, marks=pytest.mark.slow),
        pytest.param([0, 0, 0, 0], {0: "xdp"}, marks=pytest.mark.slow),
    ],
)
def test_sums_are_exact_whatever_adds_up(rack, bpf, racks, paths, monkeypatch):
    monkeypatch.setattr(udp, "datagrams", one_by_one)
    monkeypatch.setattr(ends, "datagrams", one_by_one)
    random = np.random.default_rng(0)
    made = [
        random.integers(-(2**31), 2**31, (RANKS, size)).astype(np.int32)
        for size in (60_011, 1, 4000)
    ]
    totals = [values.sum(axis=0, dtype=np.int64).astype(np.int32) for values in made]
    ring, exchange = ring_of_racks(racks, set(paths)), Exchange()
    places = {
        number: InARack(rack, path, another=bool(number))
        for number, path in paths.items()
    }
    with contextlib.ExitStack() as stack:
        there = {n: stack.enter_context(p.running()) for n, p in places.items()}
        where = {n: (places[n].host, one.port) for n, one in there.items()}
        stack.enter_context(rack.losing(0.01))

        def work(rank):
            with next(iter(places.values())).at(rank):
                end = RingEnd(
                    ring,
                    rank,
                    where,
                    exchange.of(rank),
                    token=TOKEN,
                    job="a ring",
                    slots=32,
                )
                try:
                    for values in made:
                        end.sum_integers(values[rank])
                finally:
                    end.serve_while(lambda: exchange.barrier.wait(SECONDS))
                    end.close()

        together(RANKS, work)
        came = {n: one.summary()["contributions"] for n, one in there.items()}
    for values, total in zip(made, totals, strict=True):
        assert (values == total).all()
    assert all(count > 100 for count in came.values())
