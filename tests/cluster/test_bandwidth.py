"""Max-min sharing: hand-worked rates, and what must hold whatever the pattern."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.bandwidth import BandwidthSharing, Flow
from tests.support.profiles import examples


def flow(demand: Mapping[int, int], size: float = 1000.0) -> Flow:
    return Flow(demand, size, lambda now: None)


def shared(capacities: list[float], *demands: Mapping[int, int]) -> list[float]:
    """The rates of flows that run together."""
    return rates_of(BandwidthSharing(capacities), [flow(demand) for demand in demands])


def rates_of(sharing: BandwidthSharing, members: list[Flow]) -> list[float]:
    """Start these flows; return their rates."""
    for member in members:
        sharing.start(member)
    sharing.advance(0.0)
    return [member.rate for member in members]


def test_one_activity_gets_its_tightest_link() -> None:
    assert shared([10, 4, 7], {0: 1, 1: 1, 2: 1}) == [4]


def test_equal_flows_share_equally() -> None:
    assert shared([8], *[{0: 1}] * 8) == [1] * 8


def test_what_one_cannot_use_goes_to_the_others() -> None:
    # Link 1 holds the second flow at 2, so the first has the other 8 of link 0.
    assert shared([10, 2], {0: 1}, {0: 1, 1: 1}) == [8, 2]


def test_three_levels() -> None:
    # Link 2 (2 / 2 flows) gives 1 each; link 1 has 6 - 1 = 5 for one; link 0 20 - 1 - 5.
    rates = shared([20, 6, 2], {0: 1}, {0: 1, 1: 1}, {0: 1, 1: 1, 2: 1}, {2: 1})
    assert rates == [14, 5, 1, 1]


def test_a_collective_counts_as_its_number_of_connections() -> None:
    # Three connections of one flow and one of another: 12 / 4 for each connection.
    assert shared([12], {0: 3}, {0: 1}) == [3, 3]


def test_all_connections_of_a_collective_have_the_rate_of_its_slowest() -> None:
    # Link 1: 4 / 2 = 2. On link 0 the collective takes 1 x 2, and the flow the other 8.
    assert shared([10, 4], {0: 1, 1: 2}, {0: 1}) == [2, 8]


def test_links_without_limit_do_not_limit() -> None:
    assert shared([math.inf, 3], {0: 1, 1: 1}, {0: 2}) == [3, math.inf]


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_nobody_is_faster_than_the_most(many: bool) -> None:
    """The first link leaves 2 to each, of which 1 is used; the second leaves 0.25 to each."""
    count = 100 if many else 4
    sharing = BandwidthSharing([2.0 * count, 0.25 * count], most=1.0)
    members = [flow({link: 1}) for link in (0, 1) for _ in range(count)]
    assert rates_of(sharing, members) == pytest.approx([1.0] * count + [0.25] * count)


def run(
    sharing: BandwidthSharing, starts: list[tuple[float, Flow]]
) -> dict[Flow, float]:
    """Drive *sharing* to its end; when each flow ended."""
    ends: dict[Flow, float] = {}
    waiting = sorted(starts, key=lambda pair: pair[0])
    now = 0.0
    while True:
        ends.update(dict.fromkeys(sharing.advance(now), now))
        now = min(waiting[0][0] if waiting else math.inf, sharing.next_end())
        if now == math.inf:
            return ends
        while waiting and waiting[0][0] == now:
            sharing.start(waiting.pop(0)[1])


def test_rates_change_when_another_starts_and_ends() -> None:
    a, b = flow({0: 1}, 100), flow({0: 1}, 30)
    ends = run(BandwidthSharing([10]), [(0.0, a), (4.0, b)])
    # a alone moves 40 until 4; then 5 each: b's 30 take 6 s, a has 30 left at 10.
    assert ends == {a: pytest.approx(13), b: pytest.approx(10)}


def test_capacity_can_change_and_vanish() -> None:
    sharing = BandwidthSharing([10])
    a = flow({0: 1}, 100)
    sharing.start(a)
    sharing.advance(0.0)
    assert sharing.next_end() == 10
    sharing.set_capacity(0, 0.0)  # from second 4 on: 60 bytes are left
    sharing.advance(4.0)
    assert a.rate == 0
    assert sharing.next_end() == math.inf
    sharing.set_capacity(0, 20)
    assert sharing.advance(100.0) == []
    assert sharing.next_end() == pytest.approx(103)
    assert sharing.advance(sharing.next_end()) == [a]
    assert sharing.next_end() == math.inf


def test_ends_that_differ_by_rounding_alone_are_one_instant() -> None:
    a, b = flow({0: 1}, 0.3), flow({1: 1}, 0.2)
    assert 0.3 / 0.1 != 1 + 0.2 / 0.1
    ends = run(BandwidthSharing([0.1, 0.1]), [(0.0, a), (1.0, b)])
    assert ends[a] == ends[b]


_cases = st.integers(1, 6).flatmap(
    lambda links: st.tuples(
        st.lists(
            st.sampled_from([1.0, 0.1, 3.0, 7.5, 100.0]), min_size=links, max_size=links
        ),
        st.lists(
            st.tuples(
                st.dictionaries(
                    st.integers(0, links - 1), st.integers(1, 4), min_size=1
                ),
                st.floats(0.001, 50),  # size
                st.floats(0, 20),  # start
            ),
            min_size=1,
            max_size=8,
        ),
    )
)

CLOSE = 1e-9


def check_max_min(capacities: list[float], members: list[Flow]) -> None:
    """No link carries more than it can; each flow has a full link on which no other
    one is faster. (That is max-min fairness: nobody can gain without someone equal or
    slower losing.)"""
    load: Counter[int] = Counter()
    for member in members:
        for link, connections in member.demand.items():
            load[link] += member.rate * connections  # type: ignore[assignment]
    for link, rate in load.items():
        assert rate <= capacities[link] * (1 + CLOSE)
    for member in members:
        assert any(
            load[link] >= capacities[link] * (1 - CLOSE)
            and all(
                other.rate <= member.rate * (1 + CLOSE)
                for other in members
                if link in other.demand
            )
            for link in member.demand
        )


@settings(max_examples=examples(200))
@given(_cases)
def test_rates_are_max_min_fair_and_bytes_are_conserved(case) -> None:
    capacities, flows = case
    members = [flow(demand, size) for demand, size, _ in flows]
    waiting = sorted(range(len(flows)), key=lambda i: flows[i][2])
    sharing = BandwidthSharing(capacities)
    moved = dict.fromkeys(members, 0.0)
    running: list[Flow] = []
    now = 0.0
    while waiting or running:
        soonest = flows[waiting[0]][2] if waiting else math.inf
        following = min(soonest, sharing.next_end())
        for member in running:
            moved[member] += member.rate * (following - now)
        now = following
        while waiting and flows[waiting[0]][2] == now:
            running.append(members[waiting.pop(0)])
            sharing.start(running[-1])
        for member in sharing.advance(now):
            running.remove(member)
        check_max_min(capacities, running)
    for member, (_, size, _) in zip(members, flows, strict=True):
        assert moved[member] == pytest.approx(size, rel=1e-8, abs=1e-9)


@pytest.mark.slow
@settings(max_examples=examples(25))
@given(st.integers(2, 9), st.integers(0, 2**32), st.sampled_from([1, 3, 40]))
def test_a_table_is_shared_among_as_few_are(hosts, seed, several) -> None:
    """The same flows, ended and started alike, as a table and one by one."""
    random = Random(seed)
    capacities = [random.choice([1.0, 3.0, math.inf, 7.5]) for _ in range(2 * hosts)]
    capacities[0] = 1.0
    flows = [
        (
            random.choice([0.0, 1.0, random.uniform(0, 30)]),
            {
                random.randrange(hosts): several,
                hosts + random.randrange(hosts): 1,
                0: random.choice([0.5, 1.0]),
            },
            random.choice([10.0, random.uniform(1, 100)]),
        )
        for _ in range(150)
    ]
    found = []
    for many in (3, 10**9):
        members = [flow(demand, size) for _, demand, size in flows]
        starts = list(zip([one[0] for one in flows], members, strict=True))
        ends = run(BandwidthSharing(capacities, many=many), starts)
        found.append([ends[member] for member in members])
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert len(set(found[0])) > 1


def test_rates_of_a_table_are_its_members() -> None:
    members = [flow({0: 1, 1 + i: 1}) for i in range(100)]
    sharing = BandwidthSharing([10.0, *[0.05] * 50, *[1.0] * 50])
    rates = rates_of(sharing, members)
    assert rates == pytest.approx([0.05] * 50 + [0.15] * 50)
    sharing.set_capacity(0, 0.0)
    sharing.advance(1.0)
    assert [member.rate for member in members] == [0.0] * 100
    assert sharing.next_end() == math.inf


@pytest.mark.parametrize("many", [4, 10**9])
def test_a_change_is_worked_out_for_those_alone_that_it_can_reach(many: int) -> None:
    """Ends are those of all rates worked out anew at each change, and far fewer were looked at."""
    random = Random(7)
    capacities = [random.choice([1.0, 3.0, 7.5]) for _ in range(80)] + [math.inf]
    flows = []
    for _ in range(200):  # between the 8 hosts of one of 5 switches
        switch = 16 * random.randrange(5)
        path = (switch + random.randrange(8), switch + 8 + random.randrange(8), 80)
        flows.append((random.uniform(0, 300), path, random.uniform(1, 100)))
    ends, looked_at = [], []
    for near in (200, 0):  # of all in reach; always of all
        with pytest.MonkeyPatch.context() as patch:
            seen = []

            def counted(*arguments, before=BandwidthSharing._set_rate, seen=seen):  # type: ignore[no-untyped-def]
                seen.append(1)
                before(*arguments)

            patch.setattr(BandwidthSharing, "_set_rate", staticmethod(counted))
            members = [flow(dict.fromkeys(path, 1), n) for _, path, n in flows]
            starts = [one[0] for one in flows]
            sharing = BandwidthSharing(capacities, many=many, near=near)
            done = run(sharing, list(zip(starts, members, strict=True)))
            ends.append([done[member] for member in members])
            looked_at.append(len(seen))
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)
    if many > 200:  # a table's rates are set all at once
        assert looked_at[0] < looked_at[1] / 3


@pytest.mark.parametrize("before", [0.0, 1.0])
def test_a_link_that_becomes_endless_lets_go_of_what_it_held_up(before: float) -> None:
    """As the uplink of a rack that has no limit, once a rule repairs it."""
    sharing = BandwidthSharing([4.0, before])
    held_up = flow({0: 1, 1: 1}, 8.0)
    assert rates_of(sharing, [held_up]) == [before]
    sharing.set_capacity(1, math.inf)
    sharing.advance(1.0)
    assert held_up.rate == 4.0
    assert sharing.next_end() == 1.0 + (8.0 - before) / 4.0
