"""Plans whose messages are waited for where they are used: brute force, bounds and laws."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from paceline.bucketing.cost_models import AffineCost, Cost
from paceline.bucketing.message_plan import (
    BucketCandidate,
    MessagePlan,
    MessageProblem,
    lower_bound,
    messages_of,
    period,
)
from paceline.bucketing.message_search import ReadyOrderMerges, plan_messages
from paceline.bucketing.rules import plan_buckets
from paceline.bucketing.timeline import finish_time
from paceline.errors import UsageError
from paceline.interfaces import Message
from tests.bucketing.cases import Step, all_plans, buckets_of, random_step

CLOSE = 1 + 1e-9


@dataclass(frozen=True)
class Case:
    """A step and when its tensors are used, in the same order."""

    step: Step
    uses: list[float]

    @property
    def kinds(self) -> Sequence[str]:
        return self.step.kinds or ["a"] * len(self.uses)

    @property
    def known(self) -> tuple[list[float], list[float], list[float], Cost]:
        return self.step.sizes, self.step.ready, self.uses, self.step.cost

    def plan(self, *, at_once: int = 1, halves: bool = False) -> MessagePlan:
        sizes, ready, uses, cost = self.known
        return plan_messages(
            sizes, self.kinds, ready, uses, cost, max_in_flight=at_once, halves=halves
        )

    def period(self, plan: MessagePlan, at_once: int = 1) -> float:
        return period(plan, *self.known, max_in_flight=at_once)

    def end_of_bsp(self, at_once: int = 1) -> float:
        """What a step takes whose means are waited for where backward ends."""
        step = self.step
        groups = plan_buckets(
            "optimal",
            step.sizes,
            self.kinds,
            step.ready,
            step.cost,
            max_in_flight=at_once,
        )
        return finish_time(
            groups, step.sizes, step.ready, step.cost, max_in_flight=at_once
        )


def random_case(
    draw: random.Random, most: int, *, kinds: bool = False, overlap: bool = False
) -> Case:
    """As of real models, what is ready last is used first; or in any order; or unseen."""
    step = random_step(draw, most, kinds=kinds, overlap=overlap)
    count = len(step.sizes)
    gap = draw.choice([0, 2, 6])
    uses = list(itertools.accumulate(float(draw.randint(0, gap)) for _ in range(count)))
    order = draw.choice(["reverse", "reverse", "any", "unseen"])
    if order == "reverse":
        uses.reverse()
    elif order == "any":
        draw.shuffle(uses)
    else:
        uses = [use if draw.random() < 0.7 else 0.0 for use in uses[::-1]]
    return Case(step, uses)


def random_cases(
    seed: int, count: int, most: int, *, kinds: bool = False, overlap: bool = False
) -> list[Case]:
    draw = random.Random(seed)
    return [random_case(draw, most, kinds=kinds, overlap=overlap) for _ in range(count)]


# ---- every plan of a few tensors ----


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Every way to put *items* in groups."""
    if not items:
        yield []
        return
    first, *rest = items
    for others in partitions(rest):
        yield [[first], *others]
        for number, group in enumerate(others):
            yield [*others[:number], [first, *group], *others[number + 1 :]]


def all_periods(case: Case, parts: int) -> Iterator[float]:
    """What a step takes by each plan that cuts no bucket in more than so many equal parts:
    by the words of the definition, for one message at a time."""
    sizes, ready, uses, cost = case.known
    for groups in partitions(range(len(sizes))):
        if any(len({case.kinds[p] for p in group}) > 1 for group in groups):
            continue
        for cut in itertools.product(range(1, parts + 1), repeat=len(groups)):
            jobs = [number for number, n in enumerate(cut) for _ in range(n)]
            for order in set(itertools.permutations(jobs)):
                free = latest = 0.0
                for number in order:
                    group = groups[number]
                    released = max(ready[p] for p in group)
                    size = sum(sizes[p] for p in group) / cut[number]
                    free = max(free, released) + cost(size)
                    first_use = ready[-1] + min(uses[p] for p in group)
                    latest = max(latest, free - first_use)
                yield ready[-1] + latest


@pytest.mark.parametrize(("most", "parts"), [(3, 2), (4, 1)])
@pytest.mark.parametrize("kinds", [False, True], ids=["one kind", "two kinds"])
def test_no_plan_is_far_better_and_none_beats_the_bound(
    most: int, parts: int, kinds: bool
) -> None:
    ratios = []
    for case in random_cases(1, 80, most, kinds=kinds):
        least = min(all_periods(case, parts))
        ours = case.period(case.plan())
        assert lower_bound(*case.known) <= min(ours, least) * CLOSE, case
        ratios.append(ours / least if least else 1.0)
    # Of three or four tensors, one bucket in the wrong place is much.
    assert statistics.mean(ratios) <= 1.02
    assert max(ratios) <= 1.7
    assert statistics.quantiles(ratios, n=20)[-1] <= 1.13


def test_merges_of_neighbours_in_ready_order_are_exact() -> None:
    for case in random_cases(8, 150, 8, kinds=True):
        problem = MessageProblem(
            case.step.sizes, case.kinds, case.step.ready, case.uses, case.step.cost, 1
        )

        def exposed(buckets: Sequence[BucketCandidate], of=problem) -> float:
            return max(of.exposed_times([of.message(bucket) for bucket in buckets]))

        tried = [
            exposed([problem.bucket(positions) for positions in buckets_of(lengths)])
            for lengths in all_plans(len(case.uses), case.kinds)
        ]
        merges = ReadyOrderMerges(problem).least_late(min(tried) - 1, max(tried) + 1)
        assert merges is not None
        assert exposed(merges) == pytest.approx(min(tried), abs=1e-5), case


# ---- laws ----


def assert_whole(made: MessagePlan, case: Case, halves: bool = False) -> None:
    """Each tensor is in one bucket, of one kind; each bucket is sent once; nothing is sent
    a second time; buckets are in the order in which they are ready."""
    assert sorted(itertools.chain(*made.buckets)) == list(range(len(case.uses)))
    for group in made.buckets:
        assert group == sorted(group)
        assert len({case.kinds[p] for p in group}) == 1
    assert [g[-1] for g in made.buckets] == sorted(g[-1] for g in made.buckets)
    reached: dict[tuple[int, str], float] = {}
    for message in made.messages:
        key = message.bucket, message.half
        assert message.start == reached.get(key, 0.0) < message.stop
        reached[key] = message.stop
        if message.half == "gather":
            assert (message.bucket, "scatter") in reached
    kept = ["scatter", "gather"] if halves else ["all"]
    everything = {(b, half) for b in range(len(made.buckets)) for half in kept}
    assert reached == dict.fromkeys(everything, 1.0)


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_a_plan_is_whole_and_never_longer_than_bsps(at_once: int) -> None:
    for kinds in (False, True):
        for case in random_cases(
            2, 60 if at_once == 1 else 8, 12, kinds=kinds, overlap=True
        ):
            made = case.plan(at_once=at_once)
            assert_whole(made, case)
            ours = case.period(made, at_once)
            assert ours <= case.end_of_bsp(at_once) * CLOSE, case
            assert ours >= lower_bound(*case.known) / CLOSE, case


@pytest.mark.parametrize("at_once", [1, 2])
def test_plans_of_halves(at_once: int) -> None:
    for case in random_cases(3, 40, 10, kinds=True, overlap=True):
        made = case.plan(at_once=at_once, halves=True)
        assert_whole(made, case, halves=True)
        ours = case.period(made, at_once)
        assert ours >= lower_bound(*case.known, halves=True) / CLOSE, case
        if at_once == 1:
            assert ours <= case.end_of_bsp() * CLOSE, case
        groups = plan_buckets("wfbp", case.step.sizes, case.kinds)
        dear = messages_of(groups, case.uses, halves=True)
        assert_whole(dear, case, halves=True)
        assert ours <= case.period(dear, at_once) * CLOSE, case


@pytest.mark.parametrize("at_once", [1, 2])
def test_where_everything_is_used_at_once_the_step_ends_with_its_last_message(
    at_once: int,
) -> None:
    draw = random.Random(4)
    for _ in range(60 if at_once == 1 else 10):
        step = random_step(draw, 10)
        step = Step(step.sizes, step.ready, AffineCost(3.0, 1.0, 2.0))
        case = Case(step, [0.0] * len(step.sizes))
        ours, theirs = (
            case.period(case.plan(at_once=at_once), at_once),
            case.end_of_bsp(at_once),
        )
        assert ours <= theirs * CLOSE
        if at_once == 1:
            assert ours == pytest.approx(theirs, rel=1e-12)


def test_where_start_ups_are_free_jacksons_rule_meets_the_bound() -> None:
    draw = random.Random(5)
    for _ in range(60):
        case = random_case(draw, 12)
        case = Case(
            Step(case.step.sizes, case.step.ready, AffineCost(0.0, 1.0)), case.uses
        )
        assert case.period(case.plan()) == pytest.approx(
            lower_bound(*case.known), rel=1e-2
        )


def test_a_fixed_rules_plan_is_its_buckets_in_ready_order() -> None:
    for case in random_cases(6, 60, 10, kinds=True):
        groups = plan_buckets("ddp", case.step.sizes, case.kinds)
        made = messages_of(groups, case.uses)
        assert_whole(made, case)
        assert [message.bucket for message in made.messages] == list(range(len(groups)))
        end = finish_time(groups, case.step.sizes, case.step.ready, case.step.cost)
        assert case.step.ready[-1] <= case.period(made) <= max(end, case.step.ready[-1])


def test_dears_second_halves_go_in_the_order_of_their_first_use() -> None:
    made = messages_of([[0, 1], [2], [3]], [5.0, 4.0, 0.0, 9.0], halves=True)
    assert [(m.bucket, m.half) for m in made.messages] == [
        *((0, "scatter"), (1, "scatter"), (2, "scatter")),
        *((1, "gather"), (0, "gather"), (2, "gather")),
    ]
    unknown = messages_of([[0, 1], [2], [3]], halves=True)
    assert [m.bucket for m in unknown.messages] == [0, 1, 2, 2, 1, 0]


# ---- by hand ----


def test_what_is_ready_last_and_used_first_goes_before_the_rest() -> None:
    """10 s of what is used at 8, ready at 0; then 2 s of what is used at once, at 4: cut
    at 4, the rest of the first is in at 12, which is 4 + 8. In ready order: 12 - 4."""
    case = Case(Step([10.0, 2.0], [0.0, 4.0], AffineCost(0.0, 1.0)), [8.0, 0.0])
    made = case.plan()
    assert [m.bucket for m in made.messages] == [0, 1, 0]
    assert made.messages[0].stop == pytest.approx(0.4, abs=0.01)
    assert case.period(made) == pytest.approx(6.0, rel=0.01)
    assert case.period(messages_of([[0], [1]])) == 12.0
    assert case.end_of_bsp() == 12.0


def test_two_halves_follow_each_other() -> None:
    """Each half takes 1 s of start-up and half a byte's second, beside another's."""
    case = Case(Step([4.0, 4.0], [0.0, 1.0], AffineCost(2.0, 1.0)), [1.0, 0.0])
    made = messages_of([[0], [1]], case.uses, halves=True)
    # 3 s each, one after the other: scatters at 3 and 6, gathers 1 at 9 and 0 at 12.
    assert case.period(made) == max(9.0, 12.0 - 1.0)
    # First half 0: wire from 1, alone to 2, shared until 4 (1 s left of its own): 4; first
    # half 1: 1 s left, alone: 5. Second halves follow: 1 starts at 4, waits for 5,
    # and is on the wire from 6 to 8; 0 has one from 5, too: on the wire from 6. Shared: 10.
    assert case.period(made, 2) == 10.0


# ---- sixteen equal layers ----


def layers(at_start: bool, at_once: int = 1) -> Case:
    """16 layers of 1 MB, a ring of 8 at 1 Gbit/s, 0.078 s forward and 0.157 s backward;
    a layer's tensor is used where it starts, or where it ends."""
    cost = AffineCost(14 * 50e-6, 2 * 7 / 8 / 125e6)
    ready = [0.078 + 0.157 * (i + 1) / 16 for i in range(16)]
    uses = [0.078 * (15 - i + (not at_start)) / 16 for i in range(16)]
    return Case(Step([1e6] * 16, ready, cost), uses)


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("at_start", [False, True], ids=["used at end", "at start"])
def test_sixteen_equal_layers_are_near_the_bound(at_start: bool, at_once: int) -> None:
    case = layers(at_start)
    ours, least = (
        case.period(case.plan(at_once=at_once), at_once),
        lower_bound(*case.known),
    )
    # One at a time, each interruption costs a start-up, and whole messages cost waits.
    assert ours <= (1.045 if at_once == 1 else 1.01) * least
    assert case.end_of_bsp(at_once) >= (1.21 if at_once == 1 else 1.24) * ours


def test_many_tensors_take_a_search_of_bounded_length() -> None:
    draw = random.Random(7)
    count = 400
    cost = AffineCost(1e-3, 1e-8, 5e-4)
    ready = sorted(draw.uniform(0.1, 0.3) for _ in range(count))
    uses = sorted((draw.uniform(0, 0.1) for _ in range(count)), reverse=True)
    sizes = [draw.choice([256.0, 4e4, 4e5]) for _ in range(count)]
    case = Case(Step(sizes, ready, cost), uses)
    made = case.plan()
    assert_whole(made, case)
    assert case.period(made) <= 1.08 * lower_bound(*case.known)


# ---- what may be odd ----


def test_nothing_one_tensor_and_no_bytes() -> None:
    cost = AffineCost(2.0, 1.0)
    assert plan_messages([], [], [], [], cost) == MessagePlan([], ())
    assert (
        lower_bound([], [], [], cost)
        == period(MessagePlan([], ()), [], [], [], cost)
        == 0.0
    )
    one = Case(Step([3.0], [4.0], cost), [1.0])
    assert one.plan() == MessagePlan([[0]], (Message(0),))
    assert one.period(one.plan()) == lower_bound(*one.known) == 4.0 + 2.0 + 3.0 - 1.0
    for at_once in (1, 2):
        for halves in (False, True):
            empty = Case(Step([0.0] * 3, [1.0, 1.0, 1.0], cost), [0.0, 5.0, 0.0])
            made = empty.plan(at_once=at_once, halves=halves)
            assert_whole(made, empty, halves)
            assert empty.period(made, at_once) == pytest.approx(3.0)
    free = Case(Step([0.0] * 3, [0.0] * 3, AffineCost(0.0, 0.0)), [0.0] * 3)
    assert free.period(free.plan(at_once=2), 2) == 0.0


def test_times_and_plans_that_cannot_be() -> None:
    cost = AffineCost(1.0, 1.0)
    with pytest.raises(UsageError, match=r"uses: .*got -1"):
        plan_messages([1.0], ["a"], [0.0], [-1.0], cost)
    with pytest.raises(UsageError, match=r"uses: .*1, got 0"):
        lower_bound([1.0], [0.0], [], cost)
    with pytest.raises(UsageError, match=r"kinds: .*1, got 2"):
        plan_messages([1.0], ["a", "b"], [0.0], [0.0], cost)
    with pytest.raises(UsageError, match="max_in_flight: expected 1 or more, got 0"):
        plan_messages([1.0], ["a"], [0.0], [0.0], cost, max_in_flight=0)
    with pytest.raises(UsageError, match="expected each of the 2 tensors once"):
        period(MessagePlan([[0]], (Message(0),)), [1, 1], [0.0, 0.0], [0.0, 0.0], cost)
