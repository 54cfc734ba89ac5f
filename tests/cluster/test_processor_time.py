"""What messages cost processors: threads share cores, connections share links."""

from __future__ import annotations

import pytest

from paceline.cluster import Cluster, Processor, Rack
from paceline.cluster.bandwidth import BandwidthSharing, Flow
from paceline.cluster.links import EventQueue, Links

RATE = 125e6


def ends_of(
    messages: list[tuple[str, int, int, float]], rack: Rack, processor: Processor
) -> list[float]:
    """When each message arrives that is sent at 0: connection, source, destination, bytes."""
    agenda = EventQueue()
    links = Links(agenda, Cluster((rack,), processor=processor))
    ends = [-1.0] * len(messages)

    def arrived(index: int) -> None:
        ends[index] = agenda.now

    for index, (name, source, destination, size) in enumerate(messages):
        links.send(
            name,
            source,
            destination,
            size,
            lambda: None,
            lambda index=index: arrived(index),  # type: ignore[misc]
        )
    agenda.run()
    return ends


@pytest.mark.parametrize("small", [0, 10, 30])
def test_small_messages_elsewhere_leave_a_large_one_its_link(small: int) -> None:
    """32 ms of a link and 1 ms of one of two cores, beside *small* messages of other hosts."""
    rack = Rack(workers=4, link=RATE, latency=0.0)
    shared = Processor(message=1e-3, cores=2)
    messages = [("large", 0, 1, 4e6), *[("small", 2, 3, 4e3)] * small]
    ends = ends_of(messages, rack, shared)
    assert ends[0] == pytest.approx(0.032)
    assert ends[1:] == pytest.approx([1e-3 * (i + 1) for i in range(small)])


@pytest.mark.parametrize("cores", [1, 2, 16, 64])
def test_a_message_is_the_work_of_one_thread(cores: int) -> None:
    rack = Rack(workers=4, link=RATE, latency=0.0)
    shared = Processor(message=1e-3, cores=cores)
    assert ends_of([("one", 0, 1, 4e3)], rack, shared) == pytest.approx([1e-3])


def test_threads_share_the_cores_that_they_find() -> None:
    # Three messages of 6 ms each on two cores: 18 ms of work take 9 ms.
    rack = Rack(workers=6, link=RATE, latency=0.0)
    messages = [(str(i), i, 5 - i, 1.0) for i in range(3)]
    shared = Processor(message=6e-3, cores=2)
    assert ends_of(messages, rack, shared) == pytest.approx([9e-3] * 3)
    own = Processor(message=6e-3)
    assert ends_of(messages, rack, own) == pytest.approx([6e-3] * 3)


@pytest.mark.parametrize(("cores", "seconds"), [(1, 4e-3), (2, 2e-3), (4, 1e-3)])
def test_workers_of_a_host_use_as_many_of_its_cores(cores: int, seconds: float) -> None:
    rack = Rack(workers=8, link=RATE, latency=0.0, workers_per_host=4, cores=cores)
    messages = [(str(i), 0, 1, 1.0) for i in range(4)]
    own = Processor(message=1e-3)
    assert ends_of(messages, rack, own) == pytest.approx([seconds] * 4)


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_nobody_is_faster_than_the_most(many: bool) -> None:
    """The first link leaves 2 to each, of which 1 is used; the second leaves 0.25 to each."""
    count = 100 if many else 4
    sharing = BandwidthSharing([2.0 * count, 0.25 * count], most=1.0)
    flows = [
        Flow({link: 1.0}, 10.0, lambda now: None)
        for link in (0, 1)
        for _ in range(count)
    ]
    for flow in flows:
        sharing.start(flow)
    sharing.advance(0.0)
    rates = [flow.rate for flow in flows]
    assert rates == pytest.approx([1.0] * count + [0.25] * count)


@pytest.mark.parametrize(
    ("workers", "cores", "each", "seconds"),
    [(2, 2, 1, 1.0), (3, 2, 1, 1.5), (8, 2, 1, 4.0), (2, 4, 4, 2.0), (1, 2, 2, 1.0)],
)
def test_who_computes_shares_the_cores(
    workers: int, cores: int, each: int, seconds: float
) -> None:
    agenda = EventQueue()
    rack = Rack(workers=8, link=RATE, latency=0.0)
    links = Links(agenda, Cluster((rack,), processor=Processor(cores=cores)))
    ends: list[float] = []
    for host in range(workers):
        links.compute(host, 1.0, each, lambda: ends.append(agenda.now))
    agenda.run()
    assert ends == pytest.approx([seconds] * workers)


@pytest.mark.parametrize(
    ("computing", "cores", "seconds"),
    [(0, 2, 1.0), (1, 2, 1.0), (2, 2, 4.5), (2, 4, 1.0), (3, 2, 6.0)],
)
def test_a_message_costs_more_where_all_cores_compute(
    computing: int, cores: int, seconds: float
) -> None:
    """1 s alone, and 3 s where it takes a core from others."""
    agenda = EventQueue()
    rack = Rack(workers=4, link=RATE, latency=0.0)
    shared = Processor(message=1.0, message_while_computing=3.0, cores=cores)
    links = Links(agenda, Cluster((rack,), processor=shared))
    ends: list[float] = []
    for host in range(computing):
        links.compute(host, 8.0, 1, lambda: None)
    links.send("c", 3, 0, 1.0, lambda: None, lambda: ends.append(agenda.now))
    agenda.run()
    assert ends == [pytest.approx(seconds)]


def test_a_message_costs_the_same_again_once_computing_has_ended() -> None:
    agenda = EventQueue()
    rack = Rack(workers=2, link=RATE, latency=0.0)
    shared = Processor(message=1.0, message_while_computing=3.0, cores=1)
    links = Links(agenda, Cluster((rack,), processor=shared))
    ends: list[float] = []

    def computed() -> None:
        links.send("c", 0, 1, 1.0, lambda: None, lambda: ends.append(agenda.now))

    links.compute(0, 2.0, 1, computed)
    agenda.run()
    assert ends == [pytest.approx(3.0)]


def test_a_message_waits_for_those_who_compute_and_they_for_it() -> None:
    # One core: a message of 2 s and computing of 6 s get half of it each.
    agenda = EventQueue()
    rack = Rack(workers=2, link=RATE, latency=0.0)
    shared = Processor(message=2.0, cores=1)
    links = Links(agenda, Cluster((rack,), processor=shared))
    ends: dict[str, float] = {}
    links.compute(0, 6.0, 1, lambda: ends.update(computed=agenda.now))
    links.send(
        *("c", 1, 0, 1.0),
        lambda: None,
        lambda: ends.update(arrived=agenda.now),
    )
    agenda.run()
    assert ends == {"arrived": pytest.approx(4.0), "computed": pytest.approx(8.0)}
