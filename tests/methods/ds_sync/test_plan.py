"""A plan: the same on every worker, one period through all epochs, refused if it cannot be."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.methods.ds_sync.divide import make_plan
from paceline.methods.ds_sync.plan import Plan, check_connected
from tests.support.profiles import examples


@given(
    st.sets(st.integers(0, 500), min_size=2, max_size=60),
    st.randoms(use_true_random=False),
    st.integers(0, 10_000),
)
@settings(max_examples=examples(60))
def test_a_plan_does_not_depend_on_who_makes_it(members, order, step):
    ordered = sorted(members)
    mixed = ordered.copy()
    order.shuffle(mixed)
    first = make_plan(ordered, seed=3)
    second = make_plan(mixed, seed=3)
    assert first == second
    groups = first.groups_at(step)
    assert {rank: first.mine(step, rank) for rank in ordered} == {
        rank: group for group in groups for rank in group
    }


def test_a_period_goes_on_from_where_the_plan_begins():
    plan = make_plan(range(12), begins=7)
    period = len(plan.phases)
    assert plan.groups_at(7) == plan.phases[0]
    for step in range(7, 7 + 3 * period):
        assert plan.groups_at(step) == plan.phases[(step - 7) % period]


def test_one_worker_and_two_workers_have_plans():
    alone = make_plan([5], groups="digits")
    assert alone.mine(3, 5) == (5,)
    assert make_plan([2, 9], groups="digits").groups_at(4) == ((2, 9),)


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        ((((0, 1), (1, 2)),), "twice: 1"),
        ((((0, 1), (2, 3)), ((0, 1), (2, 4))), "in none: 3; no worker: 4"),
        ((((0, 1), (2,)),), "worker 2 alone"),
        ((), "got none"),
    ],
)
def test_phases_that_are_no_partition_are_told(phases, words):
    with pytest.raises(UsageError, match=words):
        Plan(phases)


def test_a_period_that_leaves_workers_apart_is_told():
    plan = Plan((((0, 1), (2, 3), (4, 5)), ((0, 2), (1, 3), (4, 5))))
    with pytest.raises(UsageError, match=r"never meet, \{0, 1, 2, 3\} and \{4, 5\}"):
        check_connected(plan)


def test_a_worker_without_a_group_is_told():
    with pytest.raises(UsageError, match="worker 4 is in no group"):
        make_plan(range(4), groups="digits").mine(0, 4)


def test_a_design_that_is_not_there_is_told():
    with pytest.raises(UsageError, match="Did you mean 'digits'"):
        make_plan(range(8), groups="digit")
