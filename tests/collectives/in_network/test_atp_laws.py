"""Sums through several switches and servers are exact, whatever happens to datagrams."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives.in_network.atp_tree import Server, Ways, beside_workers
from paceline.collectives.in_network.operations import IntegerSum
from paceline.collectives.in_network.patient_stream import PatientStream
from tests.collectives.in_network.atp_net import Tree, layouts
from tests.collectives.in_network.net import ELEMENTS, Worker
from tests.support.profiles import examples

WIDTH = 2
LAW = settings(max_examples=examples(20))
FATES = st.lists(st.integers(0, 8 * 64), max_size=100)


class PatientWorker(Worker):
    """With the stream that best effort has."""

    def __init__(self, index, slots, operations, number):
        super().__init__(index, slots, operations, number=number)
        self.stream = PatientStream(
            slots=slots, elements=ELEMENTS, worker=index, number=number
        )


def integers(seed, workers, size):
    values = np.random.default_rng(seed).integers(-(2**31), 2**31, (workers, size))
    return values.astype(np.int32), values.sum(axis=0).astype(np.int32)


def tree(layouts_of_jobs, slots, places, size):
    made = {
        job: integers(job, len(ways.racks), size)
        for job, ways in layouts_of_jobs.items()
    }
    streams = {
        job: [
            PatientWorker(rank, slots, [IntegerSum(mine, WIDTH)], number=job)
            for rank, mine in enumerate(values)
        ]
        for job, (values, _) in made.items()
    }
    return Tree(streams, layouts_of_jobs, slots, places), made


@LAW
@given(
    fates=FATES,
    one=layouts(),
    other=layouts(),
    slots=st.integers(1, 8),
    places=st.integers(1, 4),
    size=st.integers(0, 40),
)
def test_sums_are_exact_for_any_layout_and_any_fate(
    fates, one, other, slots, places, size
):
    """Datagrams are lost, doubled, late, out of order; two jobs compete for few places."""
    net, made = tree({1: one, 77: other}, slots, places, size)
    net.play(fates)
    net.settle()
    for values, total in made.values():
        assert (values == total).all()
    for switch in net.switches.values():
        switch.forget(1)
        switch.forget(77)
        assert switch.taken == 0


DEDICATED = (Server(0, None, 0),)


@pytest.mark.parametrize(
    ("racks", "aggregating", "servers", "streams"),
    [
        ((0, 0, 1, 1), (), DEDICATED, 4),
        ((0, 0, 1, 1), (1,), DEDICATED, 3),
        ((0, 0, 1, 1), (0, 1), DEDICATED, 1),
        ((0, 0, 1, 1), (0,), DEDICATED, 1),
        ((1, 1, 2, 2), (1, 2), DEDICATED, 2),
        ((0, 0, 1, 1), (0, 1), beside_workers((0, 0, 1, 1)), 2),
    ],
)
def test_without_faults_each_server_is_sent_what_the_model_says(
    racks, aggregating, servers, streams
):
    """n = racks that merge + workers in others, and one where the server's own merges (and
    one from the worker beside it). The control of the law above, too: a switch that merged
    nothing would be right as well."""
    net, made = tree({1: Ways(racks, aggregating, servers)}, 8, 64, 16)
    net.settle()
    ((values, total),) = made.values()
    assert (values == total).all()
    sent = [
        sum(
            1 for (what, which), _ in net.archive if (what, which) == ("server", (1, p))
        )
        for p in range(len(servers))
    ]
    chunks = 16 // WIDTH // len(servers)
    assert sent == [streams * chunks] * len(servers)
    assert all(switch.taken == 0 for switch in net.switches.values())


@pytest.mark.parametrize(("forgets", "right"), [(False, True), (True, False)])
def test_what_comes_twice_counts_once_for_its_bit_is_kept(forgets, right):
    """The control: a server that forgot whose contributions it has would add one twice."""
    net, made = tree({1: Ways((0, 0, 1), (), DEDICATED)}, 1, 1, 2)
    net.let_go()
    first = net.letters[0]
    assert first[0] == ("server", (1, 0))
    net.deliver(first)
    if forgets:
        net.servers[1, 0]._slots._memory.seen[0, 0] = 0
    net.deliver(first)
    net.settle()
    ((values, total),) = made.values()
    assert (values == total).all() == right
