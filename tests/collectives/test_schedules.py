"""Schedules, one by one. Whole all-reduces are held by the laws of the conformance kit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives import schedules
from paceline.collectives.schedule_execution import (
    perform,
    reduce_function,
    simulate_values,
    steps_of,
)
from paceline.collectives.schedules import (
    HalvingDoubling,
    Ring,
    Star,
    Tree,
    all_to_all,
    barrier,
    offset_of,
    on_ranks,
    parallel,
    segment,
    sequential,
    step_range,
)
from paceline.interfaces import Schedule, Transfer
from tests.support.profiles import examples

RANKS = [1, 2, 3, 4, 5, 7, 8, 13, 16]


def everyone(ranks: int) -> set[int]:
    return set(range(ranks))


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
        (HalvingDoubling(4, 10), [15, 15, 15, 15]),  # 5 + 3 or 2, and what is held
        (sequential(Tree(2, 10, reduce=True), Tree(2, 10)), [10, 10]),
        (on_ranks(Tree(2, 10), 4, (3, 1)), [0, 0, 0, 10]),
        (Star(3, 10, root=1), [0, 20, 0]),
        (Star(3, 10, root=1, gather=True), [10, 0, 10]),
        (all_to_all(4, 10), [30] * 4),
        (barrier(4), [0] * 4),
    ],
)
def test_bytes_sent_by_hand(schedule: Schedule, sent: list[int]) -> None:
    assert [schedule.bytes_sent(rank) for rank in range(len(sent))] == sent


@given(st.integers(0, 10**9), st.integers(1, 100))
def test_segments_are_as_equal_as_bytes_allow(size: int, parts: int) -> None:
    sizes = [segment(size, parts, index) for index in range(parts)]
    assert sum(sizes) == size
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert segment(size, parts, -1) == sizes[-1]  # indices go round
    offsets = [offset_of(size, parts, index) for index in range(parts)]
    assert offsets == [sum(sizes[:index]) for index in range(parts)]
    assert offset_of(size, parts, -1) == offsets[-1]


@given(st.integers(1, 20), st.integers(0, 10**6), st.integers(1, 2))
def test_busiest_connection_carries_the_largest_segment_every_step(
    n: int, size: int, rounds: int
) -> None:
    ring = Ring(n, size, rounds)
    ((activity,),) = ring.phases()
    largest = max(segment(size, n, index) for index in range(n))
    assert activity.bytes == ring.steps * largest
    assert activity.bytes >= max(ring.bytes_sent(r) for r in range(n))


def latency(schedule: Schedule, one_way: Callable[[int, int], float]) -> float:
    ((activity,),) = schedule.phases()
    return activity.latency(one_way)


@settings(max_examples=examples(300))
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

    assert latency(ring, one_way) == pytest.approx(max(chains), rel=1e-12)


def test_ring_latency_by_hand() -> None:
    # Four ranks, six steps: all four edges once, and the two neighbours 5 and 3 again.
    edges = [1.0, 5.0, 3.0, 2.0]
    assert latency(Ring(4, 8), lambda a, b: edges[a]) == 11 + 8
    assert latency(Ring(4, 8, rounds=1), lambda a, b: edges[a]) == 5 + 3 + 2
    assert latency(Ring(1, 8), lambda a, b: 7.0) == 0


def test_a_reduce_scatter_leaves_each_rank_its_own_part() -> None:
    for n in range(1, 8):
        held = [torch.arange(3 * n) * (rank + 1) for rank in range(n)]
        whole = sum(held)
        simulate_values(Ring(n, 3 * n, rounds=1, shift=1), held, reduce_function("sum"))
        for rank in range(n):
            part = slice(3 * rank, 3 * rank + 3)
            assert torch.equal(held[rank][part], whole[part])


def test_an_all_gather_adds_nothing() -> None:
    n = 5
    held = [torch.where(torch.arange(n) == rank, rank, -1) for rank in range(n)]
    simulate_values(Ring(n, n, rounds=1, gather=True), held, reduce_function("sum"))
    assert all(tensor.tolist() == list(range(n)) for tensor in held)


class Exchanging(Schedule):
    """Both directions between two ranks at once: what leaves is what was held before."""

    steps = 1

    def step(self, number: int):
        for rank in range(2):
            yield Transfer(rank, 1 - rank, 3, 0, adds=False)


def test_what_is_sent_in_a_step_was_held_before_it() -> None:
    held = [torch.zeros(3), torch.ones(3)]
    simulate_values(Exchanging(2), held, reduce_function("sum"))
    assert [tensor.tolist() for tensor in held] == [[1.0] * 3, [0.0] * 3]


def test_a_part_that_comes_where_one_leaves_from_waits_beside() -> None:
    """The transport may write as soon as it is asked to receive."""
    flat, left = torch.zeros(3), []

    class Done:
        def wait(self) -> None: ...

    def send(part: torch.Tensor, to: int) -> Done:
        left.append(part.tolist())
        return Done()

    def receive(part: torch.Tensor, source: int) -> Done:
        part.fill_(5.0)
        return Done()

    perform(steps_of(Exchanging(2), 0), flat, reduce_function("sum"), send, receive)
    assert left == [[0.0] * 3]
    assert flat.tolist() == [5.0] * 3


def _several(n: int) -> list[Schedule]:
    everybody = tuple(range(n))
    rings = on_ranks(Ring(1, 7), n, (0,)), on_ranks(Ring(n, 50), n, everybody, 7)
    return [
        Ring(n, 1000),
        Ring(n, 10, rounds=1, gather=True, shift=2),
        Tree(n, 100),
        Tree(n, 100, n - 1, reduce=True),
        Star(n, 100, n // 2),
        Star(n, 100, gather=True),
        all_to_all(n, 10),
        barrier(n),
        HalvingDoubling(n, 1000),
        sequential(Ring(n, 30, rounds=1), Tree(n, 30)),
        parallel(*rings),
        step_range(Ring(n, 100), 1, max(1, Ring(n, 100).steps)),
        on_ranks(all_to_all(n, 5), n + 2, tuple(range(n + 1, 1, -1)), 3),
    ]


@pytest.mark.parametrize("n", RANKS)
def test_a_rank_s_own_transfers_are_those_of_the_step_that_have_it(n: int) -> None:
    for schedule in _several(n):
        steps = [list(schedule.step(number)) for number in range(schedule.steps)]
        for rank in range(schedule.ranks):
            own_steps = list(schedule.own_steps(rank))
            assert len(own_steps) == len(steps)
            for own, whole in zip(own_steps, steps, strict=True):
                for end in ("source", "destination"):
                    mine, theirs = (
                        [one for one in of if getattr(one, end) == rank]
                        for of in (own, whole)
                    )
                    assert mine == theirs, (schedule, rank)
                for one in own:
                    ends = {one.source, one.destination}
                    assert len(ends) == 2
                    assert rank in ends <= everyone(schedule.ranks)
            sent = sum(one.size for step in steps for one in step if one.source == rank)
            assert schedule.bytes_sent(rank) == sent


def test_one_rank_s_steps_are_made_without_those_of_all_others(monkeypatch) -> None:
    """In time in proportion to the steps, and not to steps times ranks."""
    made: list[Transfer] = []

    def counted(*fields: int) -> Transfer:
        made.append(Transfer(*fields))
        return made[-1]

    monkeypatch.setattr(schedules, "Transfer", counted)
    n = 64
    inner = on_ranks(Ring(32, 320), n, tuple(range(32, n)), 5)
    for schedule in (Ring(n, 640), sequential(inner, Ring(n, 640)), all_to_all(n, 10)):
        made.clear()
        steps = steps_of(schedule, 40)
        assert len(steps) == schedule.steps
        assert len(made) <= 2 * schedule.steps


def test_combined_schedules_keep_their_order() -> None:
    tree, ring = Tree(2, 8), Ring(2, 8)
    both = sequential(
        parallel(on_ranks(tree, 4, (0, 1)), on_ranks(tree, 4, (3, 2))),
        on_ranks(ring, 4, (1, 3)),
    )
    found = [
        (number, t.source, t.destination, t.size)
        for number in range(both.steps)
        for t in both.step(number)
    ]
    assert found[:2] == [(0, 0, 1, 8), (0, 3, 2, 8)]
    assert sorted(found[2:]) == [(1, 1, 3, 4), (1, 3, 1, 4), (2, 1, 3, 4), (2, 3, 1, 4)]
    assert [both.bytes_sent(rank) for rank in range(4)] == [8, 8, 0, 16]


@pytest.mark.parametrize("n", RANKS)
def test_what_a_price_says_is_what_the_messages_do(n: int) -> None:
    for rounds in (1, 2):
        ring = Ring(n, 10 * n, rounds)
        ((activity,),) = ring.phases()
        sent = [t for number in range(ring.steps) for t in ring.step(number)]
        assert {(t.source, t.destination) for t in sent} == set(activity.traffic())
        for rank in range(n):
            assert activity.messages == sum(t.source == rank for t in sent)
        for connection, count in activity.traffic().items():
            carried = sum(t.size for t in sent if t[:2] == connection)
            assert carried == count * activity.bytes
        ((other,),) = Ring(n, 3, rounds).phases()
        assert activity.key == other.key
        assert list(activity.ranks) == list(range(n))
    keys = [Ring(n, 1, rounds).phases()[0][0].key for rounds in (1, 2)]
    assert keys[0] != keys[1]


def test_an_activity_among_some_ranks_is_theirs() -> None:
    ((activity,),) = on_ranks(Ring(3, 6), 9, (7, 2, 4)).phases()
    assert activity.ranks == [7, 2, 4]
    assert activity.traffic() == {(7, 2): 1, (2, 4): 1, (4, 7): 1}
    assert activity.latency(lambda a, b: float(10 * a + b)) == 72 + 24 + 47 + 72
    ((alone,),) = Ring(3, 6).phases()
    ((others,),) = on_ranks(Ring(3, 6), 9, (7, 4, 2)).phases()
    assert len({activity.key, alone.key, others.key}) == 3
    assert (activity.bytes, activity.messages) == (alone.bytes, alone.messages)
