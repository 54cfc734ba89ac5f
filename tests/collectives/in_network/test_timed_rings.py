"""Rings of racks take what they are priced at, with rates and queues, whatever the machine."""

import numpy as np
import pytest

from paceline.collectives.in_network.datagrams import FEWEST_QUEUED, QUEUED_BYTES
from paceline.collectives.in_network.rina import RingOfRacks
from paceline.collectives.in_network.timers import RoundTrip
from paceline.collectives.in_network.topology import ring_of_racks
from paceline.runtimes.emulated.network_plan import JUMBO_MTU
from tests.collectives.in_network.timed import SLOTS, TimedRing

RACKS = (0,) * 4 + (1,) * 4
SUMS = 2
MOST = max(FEWEST_QUEUED, QUEUED_BYTES // JUMBO_MTU)


def took(aggregators, mbit, most=MOST, elements=250_000):
    """Seconds of the last of a few sums, over those of the busiest link; and the ring."""
    ring = ring_of_racks(RACKS, range(aggregators))
    rate = mbit * 1e6 / 8
    net = TimedRing(ring, rate, most)
    random = np.random.default_rng(aggregators)
    for _ in range(SUMS):
        made = random.integers(-(2**31), 2**31, (len(RACKS), elements)).astype(np.int32)
        total = made.sum(axis=0, dtype=np.int64).astype(np.int32)
        seconds = net.sum(made)
        assert (made == total).all()
    busiest = 0.0
    streams = RingOfRacks(ring, 4 * elements).streams
    for rank in range(len(RACKS)):
        for end in (0, 1):
            load = sum(part for pair, part in streams.items() if pair[end] == rank)
            busiest = max(busiest, load)
    return seconds / (busiest * 4 * elements / rate), net


@pytest.mark.slow
@pytest.mark.parametrize("aggregators", [1, 2])
@pytest.mark.parametrize(
    "mbit",
    [
        25,
        pytest.param(10, marks=pytest.mark.slow),
        pytest.param(100, marks=pytest.mark.slow),
    ],
)
def test_a_ring_of_racks_takes_what_its_busiest_link_takes(aggregators, mbit):
    ratio, net = took(aggregators, mbit)
    assert ratio < 1.1
    assert net.lost == 0
    sent = sum(worker.stream.counts["chunks"] for worker in net.workers.values())
    assert net.repeats < 0.02 * sent


@pytest.mark.slow
def test_a_long_queue_of_ones_own_slows_all_others_down():
    """The control: answers to the aggregator wait behind it."""
    ratio, _ = took(1, 25, most=SLOTS, elements=125_000)
    assert ratio > 1.1


@pytest.mark.slow
def test_timers_of_the_mean_alone_send_much_again(monkeypatch):
    """The control: whoever sends again too early halves windows."""
    monkeypatch.setattr(
        RoundTrip,
        "timeout",
        property(lambda self: 0.1 if self._mean is None else max(0.005, self._mean)),
    )
    ratio, net = took(1, 25, elements=125_000)
    assert ratio > 1.1
    assert net.repeats > 50
