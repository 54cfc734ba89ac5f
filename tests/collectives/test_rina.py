"""Rings of racks: laws over random layouts, of schedules and in virtual time."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.aggregator.ring import ring_of_racks
from paceline.collectives.executor import combining, worked_out
from paceline.collectives.rina import RingOfRacks
from paceline.network import Cluster, Rack

LAYOUTS = st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=4)
"""Racks: workers, and whether the switch adds up."""


def cluster_of(layout, **changes):
    rack = {"link": 25e6, "latency": 50e-6, **changes}
    return Cluster(
        tuple(Rack(workers=n, aggregates=adds, **rack) for n, adds in layout)
    )


def racks_of(layout):
    racks = [i for i, (n, _) in enumerate(layout) for _ in range(n)]
    return racks, {i for i, (_, adds) in enumerate(layout) if adds}


@settings(derandomize=True, deadline=None, max_examples=100)
@given(LAYOUTS, st.integers(0, 40), st.integers(1, 5), st.randoms())
def test_sums_of_any_layout_are_exact(layout, size, pieces, draw):
    racks, aggregating = racks_of(layout)
    draw.shuffle(racks)  # ranks may be numbered in any way
    groups = ring_of_racks(racks, aggregating)
    schedule = RingOfRacks(groups, size, pieces)
    n = len(racks)
    held = [torch.randint(-(2**31), 2**31 - 1, (size,)).to(torch.int32) for _ in racks]
    total = sum(one.to(torch.int64) for one in held).to(torch.int32)  # modulo 2^32
    sent = [
        sum(
            t.size
            for number in range(schedule.steps)
            for t in schedule.step(number)
            if t.source == rank
        )
        for rank in range(n)
    ]
    worked_out(schedule, held, combining("sum"))
    assert all(torch.equal(one, total) for one in held)
    assert [schedule.bytes_sent(rank) for rank in range(n)] == sent
