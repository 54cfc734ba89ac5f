"""Schedules: contributions travel along the steps, and everyone gets what is due."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives.schedule import (
    Exchange,
    Ring,
    Schedule,
    Star,
    Tree,
    all_to_all,
    barrier,
    segment,
)

RANKS = [1, 2, 3, 4, 5, 7, 8, 13, 16]
Holdings = list[dict[int, set[int]]]
"""Per rank: whose contributions its copy of each segment contains."""


def everyone(ranks: int) -> set[int]:
    return set(range(ranks))


def play_ring(ring: Ring, holdings: Holdings, *, adds: int) -> None:
    """Move segments; for the first *adds* steps a receiver adds, then it overwrites."""
    n = ring.ranks
    for number in range(ring.steps):
        # What is sent in a step was held before it.
        moving = []
        for transfer in ring.step(number):
            index = (transfer.source - number) % n
            assert transfer.step == number
            assert transfer.destination == (transfer.source + 1) % n
            assert transfer.size == segment(ring.size, n, index)
            content = set(holdings[transfer.source][index])
            moving.append((transfer.destination, index, content))
        assert len(moving) == n
        for destination, index, content in moving:
            if number < adds:
                content |= holdings[destination].get(index, set())
            holdings[destination][index] = content


@pytest.mark.parametrize("n", RANKS)
def test_ring_all_reduce_gives_all_of_the_sum(n: int) -> None:
    holdings: Holdings = [{i: {rank} for i in range(n)} for rank in range(n)]
    play_ring(Ring(n, 1000), holdings, adds=n - 1)
    assert holdings == [{i: everyone(n) for i in range(n)}] * n


@pytest.mark.parametrize("n", RANKS)
def test_ring_reduce_scatter_gives_each_rank_one_whole_segment(n: int) -> None:
    holdings: Holdings = [{i: {rank} for i in range(n)} for rank in range(n)]
    ring = Ring(n, 1000, rounds=1)
    play_ring(ring, holdings, adds=ring.steps)
    whole = [
        [index for index, content in held.items() if content == everyone(n)]
        for held in holdings
    ]
    assert sorted(whole) == [[index] for index in range(n)]


@pytest.mark.parametrize("n", RANKS)
def test_ring_all_gather_gives_every_rank_every_segment(n: int) -> None:
    holdings: Holdings = [{rank: {rank}} for rank in range(n)]
    play_ring(Ring(n, 1000, rounds=1), holdings, adds=0)
    assert holdings == [{i: {i} for i in range(n)}] * n


@pytest.mark.parametrize("n", RANKS)
def test_tree_broadcast_reaches_everyone_once(n: int) -> None:
    for root in range(n):
        tree = Tree(n, 10, root)
        informed = [root]
        for number in range(tree.steps):
            transfers = list(tree.step(number))
            before = set(informed)
            assert all(t.source in before and t.size == 10 for t in transfers)
            informed += [t.destination for t in transfers]
        assert sorted(informed) == list(range(n))
        assert 2**tree.steps >= n > 2**tree.steps // 2  # no step too many


@pytest.mark.parametrize("n", RANKS)
def test_tree_reduce_brings_every_contribution_once(n: int) -> None:
    for root in range(n):
        tree = Tree(n, 10, root, reduce=True)
        held = [[rank] for rank in range(n)]
        sent = []
        for number in range(tree.steps):
            for transfer in tree.step(number):
                held[transfer.destination] += held[transfer.source]
                sent.append(transfer.source)
                # What it has passed on, it does not add to again.
                assert transfer.destination not in sent
        assert sorted(held[root]) == list(range(n))
        assert sorted([*sent, root]) == list(range(n))


@pytest.mark.parametrize("n", RANKS)
def test_star_links_the_root_with_everyone(n: int) -> None:
    for root in range(n):
        others = [rank for rank in range(n) if rank != root]
        (out,) = [list(Star(n, 10, root).step(0))]
        (back,) = [list(Star(n, 10, root, gather=True).step(0))]
        assert [(t.source, t.destination) for t in out] == [(root, r) for r in others]
        assert [(t.source, t.destination) for t in back] == [(r, root) for r in others]


@pytest.mark.parametrize("n", RANKS)
def test_all_to_all_is_every_ordered_pair_once(n: int) -> None:
    schedule = all_to_all(n, 10)
    pairs = [
        (t.source, t.destination)
        for number in range(schedule.steps)
        for t in schedule.step(number)
    ]
    assert sorted(pairs) == [(a, b) for a in range(n) for b in range(n) if a != b]


@pytest.mark.parametrize("n", RANKS)
def test_after_a_barrier_everyone_knows_of_everyone(n: int) -> None:
    schedule = barrier(n)
    knows = [{rank} for rank in range(n)]
    for number in range(schedule.steps):
        before = [set(known) for known in knows]
        for transfer in schedule.step(number):
            assert transfer.size == 0
            knows[transfer.destination] |= before[transfer.source]
    assert knows == [everyone(n)] * n
    assert 2**schedule.steps >= n > 2**schedule.steps // 2


_schedules = st.integers(1, 20).flatmap(
    lambda n: st.one_of(
        st.builds(Ring, st.just(n), st.integers(0, 10**6), st.integers(1, 2)),
        st.builds(
            Tree, st.just(n), st.integers(0, 99), st.integers(0, n - 1), st.booleans()
        ),
        st.builds(
            Star, st.just(n), st.integers(0, 99), st.integers(0, n - 1), st.booleans()
        ),
        st.builds(all_to_all, st.just(n), st.integers(0, 99)),
        st.just(barrier(n)),
    )
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(_schedules)
def test_bytes_sent_are_the_sum_over_steps(
    schedule: Ring | Tree | Star | Exchange,
) -> None:
    transfers = [t for number in range(schedule.steps) for t in schedule.step(number)]
    assert all(0 <= t.source < schedule.ranks for t in transfers)
    assert all(0 <= t.destination < schedule.ranks for t in transfers)
    assert all(t.source != t.destination for t in transfers)
    for rank in range(schedule.ranks):
        sent = sum(t.size for t in transfers if t.source == rank)
        assert schedule.bytes_sent(rank) == sent


@pytest.mark.parametrize(
    ("schedule", "sent"),
    [
        (Ring(4, 400), [600] * 4),  # 2 (n - 1) segments of 100
        (Ring(4, 400, rounds=1), [300] * 4),
        # Segments 0, 1, 2 of 4, 3 and 3 bytes. Rank r leaves out segment r + 1 in the
        # first round and r + 2 in the second.
        (Ring(3, 10), [20 - 3 - 3, 20 - 3 - 4, 20 - 4 - 3]),
        (Tree(5, 10), [30, 10, 0, 0, 0]),  # 0 to 1, 2 and 4; 1 to 3
        (Tree(5, 10, root=3), [0, 0, 0, 30, 10]),
        (Tree(5, 10, reduce=True), [0, 10, 10, 10, 10]),
        (Star(3, 10, root=1), [0, 20, 0]),
        (Star(3, 10, root=1, gather=True), [10, 0, 10]),
        (all_to_all(4, 10), [30] * 4),
        (barrier(4), [0] * 4),
    ],
)
def test_bytes_sent_by_hand(schedule: Schedule, sent: list[int]) -> None:
    assert [schedule.bytes_sent(rank) for rank in range(len(sent))] == sent


@settings(derandomize=True, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 100))
def test_segments_are_as_equal_as_bytes_allow(size: int, parts: int) -> None:
    sizes = [segment(size, parts, index) for index in range(parts)]
    assert sum(sizes) == size
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert segment(size, parts, -1) == sizes[-1]  # indices go round


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 20), st.integers(0, 10**6), st.integers(1, 2))
def test_busiest_connection_carries_the_largest_segment_every_step(
    n: int, size: int, rounds: int
) -> None:
    ring = Ring(n, size, rounds)
    largest = max(segment(size, n, index) for index in range(n))
    assert ring.bytes_per_connection == ring.steps * largest
    assert ring.bytes_per_connection >= max(ring.bytes_sent(r) for r in range(n))


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from([0.0, 0.1, 50e-6, 3.0]), min_size=1, max_size=12),
    st.integers(1, 2),
)
def test_ring_latency_is_the_longest_chain(edges: list[float], rounds: int) -> None:
    n = len(edges)
    ring = Ring(n, 1000, rounds)
    # A message that starts at rank k has crossed edges k, k + 1, ... when it ends.
    chains = [
        sum(edges[(start + hop) % n] for hop in range(ring.steps)) for start in range(n)
    ]

    def one_way(source: int, destination: int) -> float:
        assert destination == (source + 1) % n
        return edges[source]

    assert ring.latency(one_way) == pytest.approx(max(chains), rel=1e-12)


def test_ring_latency_by_hand() -> None:
    # Four ranks, six steps: all four edges once, and the two neighbours 5 and 3 again.
    edges = [1.0, 5.0, 3.0, 2.0]
    assert Ring(4, 8).latency(lambda a, b: edges[a]) == 11 + 8
    assert Ring(4, 8, rounds=1).latency(lambda a, b: edges[a]) == 5 + 3 + 2
    assert Ring(1, 8).latency(lambda a, b: 7.0) == 0
