"""Groups from step times: the best partition, speed classes, and when somebody moves; how soon times
are known, and what noise does to groups: nothing."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.interfaces import Groups
from paceline.methods import GSSP
from paceline.methods.gssp.grouping import (
    LEAST_STEPS,
    GroupKnowledge,
    GroupNotice,
    Hysteresis,
    Merging,
    RegroupDecisions,
    Regrouping,
    StepTime,
    StepTimes,
    encode,
    fewest_groups,
    group_by_speed,
    keep_numbers,
    partition,
    read_group_notice,
    speed_classes,
    step_time,
)
from paceline.methods.gssp.grouping import smoothed as smoothed_times
from tests.support.group_discipline_trial import GroupTrial, each
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


# ---- step times ----

Seconds = Callable[[int, int], float]
"""Of a worker's step, by its number."""
MOST = 20


def by_speed() -> Regrouping:
    return Regrouping(0, 4, 1.25, Hysteresis(0.15, 2), Merging(1.25, 2))


class Blind(Regrouping):
    """Does not know how well times are known."""

    error = 1.0  # type: ignore[assignment]

    def __init__(self) -> None:
        self._inner = by_speed()

    def decide(self, groups: Groups, times: Mapping[int, StepTime]) -> Sequence[int]:
        return self._inner.decide(
            groups, {worker: its._replace(error=0.0) for worker, its in times.items()}
        )


def play(
    workers: int,
    seconds: Seconds,
    rounds: int,
    regroup: Regrouping | None = None,
    most: int = MOST,
) -> list[tuple[int, tuple[int, ...]]]:
    """The groups, and after how many measured steps of each they became so."""
    known = GroupKnowledge(Groups((0,) * workers, 4))
    decisions, times = RegroupDecisions(regroup or by_speed()), StepTimes(most)
    now, found = [0.0] * workers, list[tuple[int, tuple[int, ...]]]()
    for number in range(rounds):
        for worker in range(workers):
            times.begin_step(worker, now[worker])
            now[worker] += seconds(worker, number)
            its = times.end_step(worker, now[worker])
            new = {} if its is None else {worker: its}
            if not new and (error := decisions.needed_error(known.groups)):
                new = times.take_early(range(workers), error)
            for one, what in new.items():
                known.add_time(one, smoothed_times(known.times.get(one), what))
            if new and decisions.decide(known, range(workers)):
                found.append((number + 1, known.groups.of))
    return found


def noisy(classes: Sequence[float], sigma: float, seed: int) -> Seconds:
    draws = random.Random(seed)
    return lambda worker, _: classes[worker] * math.exp(draws.gauss(0.0, sigma))


def parts(of: Sequence[int]) -> set[frozenset[int]]:
    return {frozenset(w for w, its in enumerate(of) if its == g) for g in set(of)}


# ---- noise ----


@pytest.mark.parametrize("sigma", [0.1, 0.2, 0.3])
def test_noise_alone_forms_no_groups(sigma: float) -> None:
    for seed in range(12):
        found = play(8, noisy([1.0] * 8, sigma, seed), 120)
        assert [of for _, of in found] == [(0,) * 8], f"seed {seed}"


@pytest.mark.parametrize("sigma", [0.2, 0.3])
def test_it_does_where_nobody_asks_how_well_times_are_known(sigma: float) -> None:
    """The control of the test above."""
    wrong = sum(
        len(set(play(8, noisy([1.0] * 8, sigma, seed), 30, Blind())[0][1])) > 1
        for seed in range(12)
    )
    assert wrong > 6


@settings(max_examples=examples(15))
@given(st.integers(0, 10**6), st.sampled_from([0.02, 0.05]))
def test_lasting_differences_of_a_third_are_found_soon(seed: int, sigma: float) -> None:
    classes = [1.0, 1.33, 1.0, 1.33, 1.77, 1.77]
    steps, of = play(6, noisy(classes, sigma, seed), MOST)[0]
    assert parts(of) == {frozenset(its) for its in ({0, 2}, {1, 3}, {4, 5})}
    assert steps <= (5 if sigma < 0.03 else 10)


def test_what_varies_is_measured_for_longer_and_not_for_ever() -> None:
    steps = [play(4, noisy([1.0] * 4, sigma, 1), 40)[0][0] for sigma in (0.02, 0.1, 1)]
    assert steps[0] == LEAST_STEPS < steps[1] < steps[2] == MOST


def test_under_noise_classes_are_found_in_the_end() -> None:
    classes = [1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    found = play(6, noisy(classes, 0.3, 3), 300)
    assert parts(found[-1][1]) == {frozenset(its) for its in ({0, 1}, {2, 3}, {4, 5})}
    assert len(found) <= 4, "they flap"


# ---- what does not last ----


def test_a_warm_up_parts_nobody() -> None:
    """Three slow steps after the one that is not measured."""
    noise = noisy([1.0] * 4, 0.02, 5)

    def seconds(worker: int, step: int) -> float:
        slow = 3.0 if worker == 1 and step < 3 else 1.0
        return slow * noise(worker, step)

    ((steps, of),) = play(4, seconds, 60)
    assert of == (0,) * 4
    assert LEAST_STEPS < steps < MOST
    # Five steps of which nobody asks how well they are known do part them.
    assert len(set(play(4, seconds, 60, Blind())[0][1])) == 2


def test_who_is_slow_for_a_while_stays() -> None:
    """Later times are of as many steps as may be. The control: of five steps they would not be."""
    noise = noisy([1.0, 1.0, 2.0, 2.0], 0.02, 6)

    def seconds(worker: int, step: int) -> float:
        slow = 2.0 if worker == 1 and 60 <= step < 75 else 1.0
        return slow * noise(worker, step)

    assert len(play(4, seconds, 200)) == 1
    assert len(play(4, seconds, 200, most=5)) > 1


def test_one_evaluation_changes_neither_a_time_nor_what_is_known_of_it() -> None:
    rest = [1.0 + 0.01 * (step % 3) for step in range(9)]
    once = step_time([*rest, 50.0])
    assert once.seconds == pytest.approx(step_time(rest).seconds, rel=0.01)
    assert once.error < 0.01


# ---- what lasts ----


def test_who_changes_for_good_moves_and_who_becomes_alike_is_one_group_again() -> None:
    noise = noisy([1.0] * 4, 0.05, 7)

    def seconds(worker: int, step: int) -> float:
        slow = 2.0 if worker == 3 and 60 <= step < 200 else 1.0
        return slow * noise(worker, step)

    one, apart, again = play(4, seconds, 340)
    assert one[1] == again[1] == (0,) * 4
    assert parts(apart[1]) == {frozenset({0, 1, 2}), frozenset({3})}
    assert 60 + MOST < apart[0] <= 60 + 3 * MOST
    assert 200 + MOST < again[0] <= 200 + 4 * MOST


def test_steps_are_counted_from_the_first_answer_on() -> None:
    """By a whole server: however long the first step takes, eight are enough."""
    times = [1.0, 1.33, 1.0, 1.33]
    seconds = each(*times)
    first = seconds[0]
    seconds[0] = lambda now: 9.0 if now == 0.0 else first(now)
    trial = GroupTrial(GSSP(), seconds, [40] * 4, jitter=0.1)
    known: list[Groups] = []
    trial.after(9.0 + 8 * 1.33 * 1.1, lambda: known.append(trial.discipline(0).groups))
    trial.play()
    assert parts(known[0].of) == {frozenset({0, 2}), frozenset({1, 3})}


# ---- errors ----


@settings(max_examples=examples(20))
@given(st.integers(0, 10**6), st.integers(LEAST_STEPS, 40), st.floats(0.01, 0.5))
def test_errors_are_those_of_medians(seed: int, steps: int, sigma: float) -> None:
    draws = random.Random(seed)
    found = [
        step_time([math.exp(draws.gauss(0.0, sigma)) for _ in range(steps)])
        for _ in range(300)
    ]
    said = math.sqrt(math.fsum(its.error**2 for its in found) / 300)
    true = math.sqrt(math.fsum(math.log(its.seconds) ** 2 for its in found) / 300)
    assert 0.75 < said / true < 1.7  # more of few


def test_of_a_few_steps_that_somebody_asked_for_nothing_is_known() -> None:
    assert step_time([1.0, 2.0]) == StepTime(1.5, 0.0)


@pytest.mark.parametrize("error", [-0.1, 1e300, math.inf, math.nan])
def test_errors_that_make_no_sense_are_refused(error: float) -> None:
    groups = Groups((0, 0), 2)
    good = GroupNotice(groups, {1: StepTime(1.0, 0.1)})
    assert read_group_notice(encode(good), groups) == good
    with pytest.raises(UsageError):
        read_group_notice(
            encode(GroupNotice(groups, {1: StepTime(1.0, error)})), groups
        )
