"""Groups from step times: the best partition, speed classes, and when somebody moves."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.interfaces import Groups
from paceline.methods.gssp.grouping import (
    Hysteresis,
    Merging,
    Regrouping,
    StepTime,
    fewest_groups,
    group_by_speed,
    keep_numbers,
    partition,
    speed_classes,
)
from tests.support.profiles import examples

TIMES = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=7)


def widest(times: list[float], of: list[int] | tuple[int, ...]) -> float:
    return max(
        max(mine) / min(mine)
        for group in set(of)
        for mine in [[t for t, its in zip(times, of, strict=True) if its == group]]
    )


@settings(max_examples=examples(40))
@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5), st.integers(1, 4))
def test_no_partition_is_better_not_even_one_that_is_no_run(
    times: list[float], groups: int
) -> None:
    groups = min(groups, len(times))
    best = min(
        widest(times, of)
        for of in product(range(groups), repeat=len(times))
        if len(set(of)) == groups
    )
    of = partition(times, groups)
    assert set(of) == set(range(groups))
    assert widest(times, of) == pytest.approx(best, rel=1e-12)


@settings(max_examples=examples(40))
@given(TIMES, st.integers(1, 7))
def test_groups_are_numbered_from_the_fastest(times: list[float], groups: int) -> None:
    of = partition(times, min(groups, len(times)))
    for (a, first), (b, second) in combinations(zip(times, of, strict=True), 2):
        assert (first <= second) if a < b else (first >= second) if a > b else True


@settings(max_examples=examples(40))
@given(TIMES, st.floats(1.0, 4.0))
def test_so_few_groups_do_and_fewer_do_not(times: list[float], ratio: float) -> None:
    count = fewest_groups(times, ratio)
    assert widest(times, partition(times, count)) <= ratio
    if count > 1:
        assert widest(times, partition(times, count - 1)) > ratio


@settings(max_examples=examples(40))
@given(st.floats(0.01, 100.0), st.integers(1, 9), st.floats(1.0, 4.0))
def test_who_is_equally_fast_is_one_group(
    seconds: float, workers: int, ratio: float
) -> None:
    assert group_by_speed([seconds] * workers, ratio, 4) == [0] * workers


def test_no_more_groups_than_there_may_be() -> None:
    times = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert group_by_speed(times, 1.25, 9) == [0, 1, 2, 3, 4]
    assert len(set(group_by_speed(times, 1.25, 2))) == 2


def test_four_classes_are_found_whatever_their_jitter() -> None:
    times = [t * (1 + 0.01 * k) for t in (1.0, 1.5, 2.0, 3.0) for k in range(4)]
    assert group_by_speed(times, 1.25, 4) == [k // 4 for k in range(16)]


# ---- classes ----


def test_classes_follow_the_means_of_groups() -> None:
    seconds = {0: 1.0, 1: 1.2, 2: 3.0, 3: 3.0, 4: 2.0}
    of = (1, 1, 0, 0, 2)
    assert speed_classes(of, 4, seconds) == ("slowest", "fastest", "middle", "middle")


@pytest.mark.parametrize("of", [(0, 0), (0, 1)])
def test_where_nobody_is_slower_all_are_in_the_middle(of: tuple[int, ...]) -> None:
    assert set(speed_classes(of, 2, {0: 1.0, 1: 1.0})) == {"middle"}


# ---- numbers ----


@settings(max_examples=examples(40))
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=9)
)
def test_other_numbers_are_the_same_groups_and_move_no_more(
    pairs: list[tuple[int, int]],
) -> None:
    of, wanted = [a for a, _ in pairs], {i: b for i, (_, b) in enumerate(pairs)}
    after = keep_numbers(wanted, of)
    assert len(set(zip(wanted.values(), after.values(), strict=True))) == len(
        set(wanted.values())
    )
    assert len(set(after.values())) == len(set(wanted.values()))
    largest = max(Counter(pairs).values())
    assert sum(after[i] == of[i] for i in after) >= largest


# ---- hysteresis ----

NOW = Groups((0, 0, 0, 1, 1), 3, version=1)


def looks(*times: list[float], margin: float = 0.15, rows: int = 2) -> list[list[int]]:
    """The groups after each look."""
    by_speed = Regrouping(0, 3, 1.25, Hysteresis(margin, rows), Merging(1.25, rows))
    groups, after = NOW, []
    for its in times:
        of = by_speed.decide(groups, {w: StepTime(t) for w, t in enumerate(its)})
        groups = groups._replace(of=tuple(of))
        after.append(list(of))
    return after


FAST, SLOW = [1.0, 1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0, 2.0]


def test_who_has_changed_for_good_moves_at_the_second_look() -> None:
    assert looks(FAST, SLOW, SLOW) == [[0, 0, 0, 1, 1]] * 2 + [[0, 0, 1, 1, 1]]
    assert looks(FAST, SLOW, rows=1)[-1] == [0, 0, 1, 1, 1]


def test_who_was_slow_once_stays() -> None:
    assert looks(FAST, SLOW, FAST, SLOW, FAST)[-1] == list(NOW.of)


def test_a_third_class_gets_the_server_that_is_free() -> None:
    third = [1.0, 1.0, 4.0, 2.0, 2.0]
    assert looks(third, third)[-1] == [0, 0, 2, 1, 1]


def test_groups_that_have_become_alike_are_one_at_the_second_look() -> None:
    alike = [1.0, 1.05, 1.0, 1.1, 1.05]
    assert looks(alike, alike) == [list(NOW.of), [0] * 5]
    assert looks(FAST, alike, FAST, alike, FAST)[-1] == list(NOW.of)


def test_who_would_part_again_soon_does_not_become_one() -> None:
    """Two groups are as alike as the ratio allows, and stay; so do those of a number by hand."""
    hardly = [1.0, 1.0, 1.0, 1.2, 1.2]
    assert looks(*[hardly] * 4)[-1] == list(NOW.of)
    by_hand = Regrouping(2, 3, 1.25, Hysteresis(0.15, 1), Merging(1.25, 1))
    times = {worker: StepTime(1.0) for worker in range(5)}
    assert len(set(by_hand.decide(NOW, times))) == 2


def test_the_smaller_group_goes_and_takes_along_who_is_away() -> None:
    merging = Merging(1.25, 1)
    times = {worker: StepTime(1.0) for worker in (0, 1, 2, 3)}
    assert merging.decide((2, 0, 0, 0, 2), times) == [0] * 5


def test_who_is_as_fast_again_may_be_one_group_while_others_part() -> None:
    other = [1.0, 3.0, 1.0, 1.0, 1.0]
    of = looks(*[other] * 6)[-1]
    assert of[1] not in of[2:]
    assert of[3] == of[0]


@settings(max_examples=examples(20))
@given(
    st.lists(st.floats(0.5, 2.0), min_size=2, max_size=6), st.floats(0, 0.2), st.data()
)
def test_of_errors_there_are_never_more_groups(
    times: list[float], error: float, data: st.DataObject
) -> None:
    errors = [data.draw(st.floats(0.0, error)) for _ in times]
    assert fewest_groups(times, 1.25, errors) <= fewest_groups(times, 1.25)


@settings(max_examples=examples(40))
@given(st.lists(st.lists(st.floats(0.94, 1.06), min_size=5, max_size=5), max_size=6))
def test_noise_moves_nobody(noise: list[list[float]]) -> None:
    times = [[a * b for a, b in zip(FAST, row, strict=True)] for row in noise]
    assert all(of == list(NOW.of) for of in looks(*times))


def test_the_margin_holds_back_who_is_hardly_nearer() -> None:
    between = [1.0, 1.0, 1.46, 2.0, 2.0]
    assert looks(between, between, margin=0.0)[-1] != list(NOW.of)
    assert looks(between, between, margin=1.0)[-1] == list(NOW.of)
